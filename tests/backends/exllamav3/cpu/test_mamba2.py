from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import mamba2
from tests.backends.exllamav3.cpu.recurrences import HEADS, Mamba2


def chunked(inputs: Mamba2, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the engine calls the kernel, D x included."""
    b, c = (x.repeat_interleave(HEADS.group, 1).unsqueeze(0) for x in (inputs.b, inputs.c))
    written = (inputs.x * inputs.dt.unsqueeze(-1)).unsqueeze(0)
    initial = (inputs.state if state is None else state).unsqueeze(0)
    out, final = mamba2.chunk_simple_gla(
        c, b, written, g=inputs.g.unsqueeze(0), scale=1.0, initial_state=initial, output_final_state=True
    )
    assert final is not None
    return out[0] + inputs.x * inputs.skip.unsqueeze(-1), final[0]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("strongest", [1.0, 100.0])
def test_the_chunked_recurrence_equals_the_sequential_one(tokens: int, strongest: float) -> None:
    inputs = Mamba2.random(tokens, strongest)
    out, state = chunked(inputs)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)


def test_pieces_continue_where_the_last_one_ended() -> None:
    inputs = Mamba2.random(150)
    out, state = chunked(inputs.part(slice(70)))
    more, state = chunked(inputs.part(slice(70, 150)), state)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(torch.cat((out, more)), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)


def test_a_state_is_zero_unless_given_and_left_alone() -> None:
    q, k, v = torch.randn(1, 70, 2, 4), torch.randn(1, 70, 2, 4), torch.randn(1, 70, 2, 3)
    g, zeros = -torch.rand(1, 70, 2), torch.zeros(1, 2, 4, 3)
    implicit, none = mamba2.chunk_simple_gla(q, k, v, g, 0.5)
    explicit, _ = mamba2.chunk_simple_gla(q, k, v, g, 0.5, zeros, True)
    assert torch.equal(implicit, explicit)
    assert none is None
    assert not zeros.any()


@pytest.mark.parametrize("history", [False, True])
def test_the_sequential_recurrence_on_the_rows_of_a_state_pool(history: bool) -> None:
    first, second = Mamba2.random(3), Mamba2.random(3)
    second.skip = first.skip
    pool = torch.randn(6, 1, *HEADS.state_shape)
    rows_out, rows_in = torch.tensor([4, 1]), torch.tensor([5, 0]) if history else torch.tensor([4, 1])
    pool[rows_in, 0] = torch.stack((first.state, second.state))
    before, out = pool.clone(), torch.empty(2, 3, HEADS.values, HEADS.value_dim)
    mamba2.cuda_recurrent_mamba2(
        torch.stack((first.channels, second.channels)),
        torch.stack((first.g, second.g)),
        torch.stack((first.dt, second.dt)),
        first.skip,
        pool,
        out,
        HEADS.keys,
        HEADS.values,
        HEADS.key_dim,
        HEADS.value_dim,
        rows_out,
        history,
        rows_in if history else None,
    )
    for index, inputs in enumerate((first, second)):
        expected, state = inputs.reference()
        torch.testing.assert_close(out[index], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[rows_out[index], 0], state, atol=1e-5, rtol=1e-4)
    others = [row for row in range(6) if row not in rows_out.tolist()]
    assert torch.equal(pool[others], before[others])


def test_discretisation() -> None:
    raw, bias, a_log = torch.randn(1, 5, 4) * 10, torch.randn(4), torch.randn(4)
    dt, g = torch.empty_like(raw), torch.empty_like(raw)
    mamba2.mamba2_dt_op(raw, bias, a_log, dt, g, 0.01, 8.0)
    for token in range(5):
        for head in range(4):
            step = math.log1p(math.exp(float(raw[0, token, head] + bias[head])))
            step = min(max(step, 0.01), 8.0)
            assert float(dt[0, token, head]) == pytest.approx(step, rel=1e-5)
            assert float(g[0, token, head]) == pytest.approx(-math.exp(float(a_log[head])) * step, rel=1e-5)
