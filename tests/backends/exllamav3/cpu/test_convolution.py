from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.convolution import causal_conv1d_update
from backends.exllamav3.engine import DEVICE
from tests.logits import engine_logits, prompt, reference_logits

WIDTH, CHANNELS, SIZE = 4, 3, 7


def naive(past: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(channels, tokens); `past` are the columns before x."""
    columns = torch.cat((past, x), dim=-1)
    out = torch.empty_like(x)
    for channel in range(x.shape[0]):
        for token in range(x.shape[1]):
            end = past.shape[1] + token + 1
            value = sum(float(columns[channel, end - WIDTH + i] * weight[channel, i]) for i in range(WIDTH))
            value += float(bias[channel]) if bias is not None else 0.0
            out[channel, token] = value / (1.0 + math.exp(-value))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("token_major", [False, True])
def test_output_and_state(tokens: int, with_bias: bool, token_major: bool) -> None:
    state, weight = torch.randn(5, CHANNELS, SIZE), torch.randn(CHANNELS, WIDTH)
    bias = torch.randn(CHANNELS) if with_bias else None
    slots = torch.tensor([3, 1], dtype=torch.int32)
    x = torch.randn(2, CHANNELS, tokens)
    before = state.clone()
    given = x.transpose(1, 2).contiguous() if token_major else x
    out = causal_conv1d_update(given, state, slots, weight, bias, token_major=token_major)
    for row, slot in enumerate(slots.tolist()):
        past = before[slot, :, :WIDTH]
        torch.testing.assert_close(out[row].T, naive(past, x[row], weight, bias))
        newest = torch.cat((past, x[row]), dim=-1)[:, -WIDTH:]
        assert torch.equal(state[slot, :, :WIDTH], newest)
    untouched = [0, 2, 4]
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_history_keeps_what_a_rewind_needs(tokens: int) -> None:
    state, weight, x = torch.randn(1, CHANNELS, SIZE), torch.randn(CHANNELS, WIDTH), torch.randn(1, CHANNELS, tokens)
    past = state[0, :, :WIDTH].clone()
    causal_conv1d_update(x, state, torch.tensor([0]), weight, None, history=True)
    columns = torch.cat((past, x[0]), dim=-1)
    for taken_back in range(min(tokens, SIZE - WIDTH) + 1):
        end = SIZE - taken_back
        kept = columns[:, : columns.shape[1] - taken_back][:, -WIDTH:]
        assert torch.equal(state[0, :, end - WIDTH : end], kept)


def test_a_pass_that_is_fed_step_by_step() -> None:
    """As a recurrent model drafts: the state stays, its end collects what a rewind needs."""
    state, weight, x = torch.randn(1, CHANNELS, SIZE), torch.randn(CHANNELS, WIDTH), torch.randn(1, CHANNELS, 3)
    at_once, slots = state.clone(), torch.tensor([0])
    expected = causal_conv1d_update(x, at_once, slots, weight, None, history=True)
    steps = [
        causal_conv1d_update(column, state, slots, weight, None, history=True, incremental=step > 0)
        for step, column in enumerate(x.split(1, dim=-1))
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)
    assert torch.equal(state[..., -WIDTH - 2 :], at_once[..., -WIDTH - 2 :])  # of up to two tokens


def test_pieces_give_what_the_whole_gives() -> None:
    weight, x, slots = torch.randn(CHANNELS, WIDTH), torch.randn(1, CHANNELS, 10), torch.tensor([0])
    whole = causal_conv1d_update(x, None, None, weight, None)
    state = torch.zeros(1, CHANNELS, WIDTH)
    pieces = [causal_conv1d_update(piece, state, slots, weight, None) for piece in x.split([1, 6, 3], dim=-1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


def test_inputs_in_fp16_are_widened() -> None:
    x, weight = torch.randn(1, CHANNELS, 2).half(), torch.randn(CHANNELS, WIDTH).bfloat16()
    out = causal_conv1d_update(x, None, None, weight, None)
    torch.testing.assert_close(out, causal_conv1d_update(x.float(), None, None, weight.float(), None))
    assert out.dtype == torch.float


def test_without_slots_sequences_have_the_states_in_their_order() -> None:
    weight, x, state = torch.randn(CHANNELS, WIDTH), torch.randn(2, CHANNELS, 3), torch.randn(2, CHANNELS, SIZE)
    implicit, explicit = state.clone(), state.clone()
    out = causal_conv1d_update(x, implicit, None, weight, None)
    assert torch.equal(out, causal_conv1d_update(x, explicit, torch.arange(2), weight, None))
    assert torch.equal(implicit, explicit)
    assert not torch.equal(implicit, state)


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU kernels")
def test_short_convolutions_of_the_engine_compute_in_fp32(tiny_conv: Path) -> None:
    """In bf16, as its weights are, the least cosine is 0.99993."""
    ids = prompt(400)
    logits, expected = engine_logits(tiny_conv, ids), reference_logits(tiny_conv, ids)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.99998
