from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.delta_net import Heads
from backends.exllamav3.cpu.rewind import ConvRewindJob, ScanReplayJob, batched_conv_rewind, batched_scan_replay
from tests.backends.exllamav3.cpu.recurrences import HEADS, KDA_HEADS, DeltaRule, Mamba2

TOKENS, KEPT = 5, 2


@dataclass
class Case:
    """What a layer stages of a pass, its state before, and that after the kept tokens."""

    kind: int
    heads: Heads
    channels: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    expected: Tensor


def case(kind: int, dtype: torch.dtype) -> Case:
    if kind == 1:
        mamba = Mamba2.random(TOKENS)
        mamba.state = mamba.state.to(dtype).float()
        expected = mamba.part(slice(KEPT)).reference()[1]
        return Case(kind, HEADS, mamba.channels, mamba.g, mamba.dt, mamba.state, expected)
    rule = DeltaRule.random(TOKENS) if kind == 0 else DeltaRule.random_kda(TOKENS)
    rule.state = rule.state.to(dtype).float()
    expected = rule.part(slice(KEPT)).reference()[1]
    heads = HEADS if kind == 0 else KDA_HEADS
    return Case(kind, heads, rule.channels, rule.g, rule.beta, rule.state, expected)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["gated delta net", "mamba2", "kda"])
@pytest.mark.parametrize("token_stride", [1, 3])
@pytest.mark.parametrize("state_half", [False, True])
def test_a_replay_of_the_first_tokens_gives_the_state_after_them(
    kind: int, token_stride: int, state_half: bool
) -> None:
    dtype = torch.half if state_half else torch.float
    given = case(kind, dtype)
    staged = []
    for values in (given.channels, given.g, given.beta):
        rows = torch.full((TOKENS * token_stride, *values.shape[1:]), float("nan"))
        rows[::token_stride] = values
        staged.append(rows)
    base, scratch = given.state.to(dtype), torch.empty_like(given.state, dtype=dtype)
    channels, g, beta, state_in, state_out = (x.data_ptr() for x in (*staged, base, scratch))
    heads = given.heads
    batched_scan_replay(
        [ScanReplayJob(channels, g, beta, state_in, state_out, 0, KEPT, token_stride)],
        None,
        kind,
        heads.keys,
        heads.values,
        heads.key_dim,
        heads.value_dim,
        state_half,
    )
    tolerance = 2e-3 if state_half else 1e-5
    torch.testing.assert_close(scratch.float(), given.expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(base.float(), given.state)


def test_overlapping_columns_of_a_convolution_move_back() -> None:
    state = torch.arange(2 * 7).view(2, 7).float()  # 2 channels; 4 columns are the state
    expected = state[:, 1:5].clone()
    source, target = state.data_ptr() + state.element_size(), state.data_ptr()
    batched_conv_rewind([ConvRewindJob(source, target, 2, 4, 7)], None)
    assert torch.equal(state[:, :4], expected)
    assert state[:, 5:].tolist() == [[5, 6], [12, 13]]
