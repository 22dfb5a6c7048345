from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from backends.exllamav3.cpu import activations


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


GATED: list[tuple[str, Callable[[float], float]]] = [
    ("silu_mul", silu),
    ("gelu_mul", gelu),
    ("relu_mul", lambda x: max(x, 0.0)),
    ("relu2_mul", lambda x: max(x, 0.0) ** 2),
]


@pytest.mark.parametrize(("name", "reference"), GATED)
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_gated_activations(name: str, reference: Callable[[float], float], limit: float) -> None:
    gates, values = torch.randn(2, 5) * 3, torch.randn(2, 5) * 3
    out = torch.empty(2, 5)
    getattr(activations, name)(gates, values, out, limit)
    for gate, value, result in zip(gates.flatten(), values.flatten(), out.flatten(), strict=True):
        activated, factor = reference(gate.item()), value.item()
        if limit:
            activated, factor = min(activated, limit), max(-limit, min(factor, limit))
        assert result.item() == pytest.approx(activated * factor, rel=1e-5, abs=1e-6)


def test_products_beyond_fp16_stay_finite() -> None:
    out = torch.empty(2, dtype=torch.half)
    activations.silu_mul(torch.tensor([300.0, 300.0]), torch.tensor([300.0, -300.0]), out, 0.0)
    assert out.tolist() == [65504.0, -65504.0]


def test_so_they_do_in_the_others() -> None:
    out, huge = torch.empty(2, dtype=torch.half), torch.tensor([300.0, 300.0])
    activations.silu_oai_mul(huge, torch.tensor([300.0, -300.0]), out, 0.0)
    assert out.tolist() == [65504.0, -65504.0]
    activations.xielu(huge, out, torch.tensor([5.0]), torch.tensor([0.0]))
    assert out.tolist() == [65504.0, 65504.0]


@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_the_activation_of_gpt_oss(limit: float) -> None:
    gates, values = torch.tensor([-2.0, 0.5, 9.0]), torch.tensor([-9.0, 0.5, 3.0])
    out = torch.empty(3)
    activations.silu_oai_mul(gates, values, out, limit)
    for gate, value, result in zip(gates.tolist(), values.tolist(), out.tolist(), strict=True):
        if limit:
            gate, value = min(gate, limit), max(-limit, min(value, limit))
        assert result == pytest.approx((value + 1) * gate / (1 + math.exp(-1.702 * gate)), rel=1e-5)


def test_gates_of_rows_and_elements() -> None:
    x, element, row = torch.randn(2, 3, 4), torch.randn(2, 12), torch.randn(2, 3)
    expected = {
        "mul_sigmoid_": x / (1 + (-element.view(2, 3, 4)).exp()),
        "mul_sigmoid_broadcast_": x / (1 + (-row[..., None]).exp()),
        "mul_softplus_broadcast_": x * (1 + row[..., None].exp()).log(),
    }
    for name, result in expected.items():
        changed = x.clone()
        getattr(activations, name)(changed, element if name == "mul_sigmoid_" else row)
        torch.testing.assert_close(changed, result)

    total = torch.ones(2, 3, 4)
    activations.add_sigmoid_gate(x, row[..., None], total)
    torch.testing.assert_close(total, 1 + expected["mul_sigmoid_broadcast_"])


def test_a_gate_that_is_projected_in_passing() -> None:
    x, hidden, weight = torch.randn(3, 8), torch.randn(3, 8).half(), torch.randn(8, 1).half()
    total = torch.ones(3, 8)
    activations.add_sigmoid_gate_proj(x, hidden, total, weight)
    for row in range(3):
        gate = 1 / (1 + math.exp(-float(hidden[row].float() @ weight[:, 0].float())))
        torch.testing.assert_close(total[row], 1 + x[row] * gate)


def test_queries_and_gates_are_taken_apart_per_head() -> None:
    rows = torch.arange(2 * 3 * 2 * 4).view(1, 2, 24).float()  # 2 tokens, 3 heads of [4 query | 4 gate]
    q, g = torch.empty(1, 2, 3, 4), torch.empty(1, 2, 12)
    activations.deinterleave_qg(rows, q, g, 4)
    for token in range(2):
        for head in range(3):
            start = head * 8
            assert q[0, token, head].tolist() == rows[0, token, start : start + 4].tolist()
            assert g[0, token, head * 4 : head * 4 + 4].tolist() == rows[0, token, start + 4 : start + 8].tolist()


def test_xielu() -> None:
    """Both slopes are softplus of a number; the negative one has a half added, and the exponent a bound."""
    values, out = torch.tensor([-3.0, -0.5, -1e-9, 0.0, 0.5, 3.0]), torch.empty(6)
    activations.xielu(values, out, torch.tensor([0.7]), torch.tensor([-0.4]))
    positive, negative = math.log1p(math.exp(0.7)), math.log1p(math.exp(-0.4)) + 0.5
    expected = [
        positive * x * x + x / 2 if x > 0 else negative * (math.expm1(min(x, -9.9838e-07)) - x) + x / 2
        for x in values.tolist()
    ]
    assert out.tolist() == pytest.approx(expected, abs=1e-6)
