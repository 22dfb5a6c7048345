from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import norms

EPSILON = 1e-5


def normalised(row: list[float]) -> list[float]:
    scale = 1.0 / math.sqrt(sum(value * value for value in row) / len(row) + EPSILON)
    return [value * scale for value in row]


def reference(x: Tensor, weight: Tensor, bias: float) -> Tensor:
    return torch.tensor([normalised(row) for row in x.tolist()]) * (weight.float() + bias)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_rms_norm(rows: int, bias: float, scale: float, dtype: torch.dtype) -> None:
    x, weight, y = torch.randn(rows, 8), torch.randn(8, dtype=dtype), torch.empty(rows, 8)
    norms.rms_norm(x, weight, y, EPSILON, bias, scale, False, False)
    torch.testing.assert_close(y, scale * reference(x, weight, bias))


def test_rms_norm_without_weight_scales() -> None:
    x, y = torch.randn(3, 8), torch.empty(3, 8)
    norms.rms_norm(x, None, y, EPSILON, 0.0, 0.5, False, False)
    torch.testing.assert_close(y, 0.5 * reference(x, torch.ones(8), 0.0))


def test_rms_norm_adds_to_the_residual() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    residual = torch.randn(3, 8)
    y = residual.clone()
    norms.rms_norm(x, weight, y, EPSILON, 0.0, 1.0, False, True)
    torch.testing.assert_close(y, residual + reference(x, weight, 0.0))


def test_rms_norm_over_all_heads_together() -> None:
    x, weight, y = torch.randn(3, 2, 4), torch.randn(8), torch.empty(3, 2, 4)
    norms.rms_norm(x, weight, y, EPSILON, 0.0, 1.0, True, False)
    torch.testing.assert_close(y.flatten(-2), reference(x.flatten(-2), weight, 0.0))


def test_rms_norm_with_a_weight_per_group() -> None:
    x, weight, y = torch.randn(2, 3, 4), torch.randn(3, 4), torch.empty(2, 3, 4)
    norms.rms_norm(x, weight, y, EPSILON, 0.0, 1.0, False, False, w_groups=3)
    for group in range(3):
        torch.testing.assert_close(y[:, group], reference(x[:, group], weight[group], 0.0))


def test_overflown_fp16_inputs_count_as_the_largest_number() -> None:
    x = torch.tensor([[float("inf"), 1.0, -float("inf"), 0.0]], dtype=torch.half)
    y = torch.empty(1, 4)
    norms.rms_norm(x, None, y, EPSILON, 0.0, 1.0, False, False)
    torch.testing.assert_close(y, torch.tensor([[2**0.5, 0.0, -(2**0.5), 0.0]]), atol=1e-4, rtol=0)


def test_the_residual_is_updated_before_its_norm_is_taken() -> None:
    x, weight, y = torch.randn(3, 8).half(), torch.randn(8), torch.empty(3, 8)
    residual = torch.randn(3, 8)
    total = residual + x.float()
    norms.rms_norm_res_in(x, weight, y, residual, EPSILON, 0.0, 1.0)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(y, reference(total, weight, 0.0))


def test_what_overflowed_does_not_spoil_the_residual() -> None:
    x, residual, y = torch.tensor([[float("inf"), 1.0]]).half(), torch.zeros(1, 2), torch.empty(1, 2)
    norms.rms_norm_res_in(x, None, y, residual, EPSILON, 0.0, 1.0)
    assert residual.tolist() == [[65504.0, 1.0]]
    torch.testing.assert_close(y, torch.tensor([[2**0.5, 0.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gate_act", [0, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_gated_rms_norm(gate_first: bool, gate_act: int, groups: int) -> None:
    x, gate = torch.randn(4, 8), torch.randn(4, 8)
    weight, y = torch.randn(8 if groups == 1 else 16), torch.empty(4, 8)
    norms.gated_rms_norm(x, weight, y, gate, EPSILON, 0.0, groups, gate_first, gate_act)
    factor = 1 / (1 + (-gate).exp())
    if gate_act == 0:
        factor = factor * gate
    for index in range(4):
        row = (x * factor)[index] if gate_first else x[index]
        part = weight.view(groups, 8)[index % groups]
        expected = torch.tensor(normalised(row.tolist())) * part
        torch.testing.assert_close(y[index], expected if gate_first else expected * factor[index])


def test_softcap() -> None:
    y = torch.empty(3)
    norms.softcap(torch.tensor([-100.0, 0.0, 15.0]), y, 30.0)
    assert y.tolist() == pytest.approx([30 * math.tanh(-100 / 30), 0.0, 30 * math.tanh(0.5)])
