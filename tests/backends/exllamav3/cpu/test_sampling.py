from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import sampling

DRAWS = 4000
LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
SIZE = LOGITS.shape[-1]


def sample(logits: Tensor = LOGITS, **options: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "logit_mask": None,
        "logit_bitmask": None,
        "workspace": None,
        "size": SIZE,
        "inv_temp": 1.0,
        "minp_log": 0.0,
        "random": 1,
        "mode": 1,
        "filters": 0,
        "top_k": 0,
        "top_p": 1.0,
        "inv_temp_filter": 1.0,
    } | options
    out = torch.empty(len(logits), 1, dtype=torch.long)
    sampling.fused_sampler(logits, out=out, **arguments)
    return out.view(-1)


def frequencies(**options: Any) -> list[float]:
    """One draw a row, all with the noise of one seed."""
    counts = sample(LOGITS.expand(DRAWS, -1), **options).bincount(minlength=SIZE)
    return [count / DRAWS for count in counts.tolist()]


def probabilities(kept: int, temperature: float = 1.0) -> list[float]:
    exponentials = [math.exp(x / temperature) for x in LOGITS[0, :kept].tolist()]
    return [e / sum(exponentials) for e in exponentials] + [0.0] * (SIZE - kept)


MODE_FILTERS = {"mode": sampling.FILTERED}


@pytest.mark.parametrize(
    ("options", "kept", "temperature"),
    [
        ({}, 6, 1.0),
        ({"inv_temp": 0.5}, 6, 2.0),
        # exp(-1) of the best and the best stay; exp(-1.5) does not
        ({"mode": sampling.MIN_P_ONLY, "minp_log": -1.2}, 2, 1.0),
        (MODE_FILTERS | {"filters": sampling.MIN_P, "minp_log": -1.6}, 3, 1.0),
        (MODE_FILTERS | {"filters": sampling.TOP_K, "top_k": 2}, 2, 1.0),
        # cumulated: 0.55, 0.75, 0.87, 0.95, 0.98, 1
        (MODE_FILTERS | {"filters": sampling.TOP_P, "top_p": 0.8}, 3, 1.0),
        (MODE_FILTERS | {"filters": sampling.TOP_P, "top_p": 0.8, "inv_temp": 0.5}, 3, 2.0),
        # of three: 0.63, 0.86, 1
        (MODE_FILTERS | {"filters": sampling.TOP_K | sampling.TOP_P, "top_k": 3, "top_p": 0.8}, 2, 1.0),
        (MODE_FILTERS | {"filters": sampling.TOP_K | sampling.MIN_P, "top_k": 5, "minp_log": -1.2}, 2, 1.0),
    ],
)
def test_filters_and_temperature(options: dict[str, Any], kept: int, temperature: float) -> None:
    drawn, expected = frequencies(**options), probabilities(kept, temperature)
    assert drawn == pytest.approx(expected, abs=0.03)  # about four standard deviations
    assert drawn[kept:] == [0.0] * (SIZE - kept)


def test_greedy_takes_the_largest_of_the_vocabulary() -> None:
    padded = torch.cat((LOGITS, torch.full((1, 2), 99.0)), dim=-1)
    assert sample(padded, mode=sampling.GREEDY).tolist() == [0]


def test_masks_take_tokens_away() -> None:
    mask = torch.zeros(1, SIZE)
    mask[0, 0] = float("-inf")
    assert sample(mode=sampling.GREEDY, logit_mask=mask).tolist() == [1]
    bits = torch.tensor([[0b110100]], dtype=torch.int32)
    assert sample(mode=sampling.GREEDY, logit_bitmask=bits).tolist() == [2]
    assert frequencies(logit_bitmask=bits)[0] == 0.0


def test_a_seed_decides() -> None:
    rows = LOGITS.expand(50, -1)
    assert torch.equal(sample(rows, random=7), sample(rows, random=7))
    assert not torch.equal(sample(rows, random=7), sample(rows, random=8))


def test_a_bitmask_reaches_over_words_and_not_beyond() -> None:
    logits, out = torch.zeros(1, 70), torch.empty(1, 70)
    words = torch.tensor([[1 << 3, -(2**31)]], dtype=torch.int32)  # bit 3, and bit 31 of the second word
    sampling.apply_logit_bitmask(logits, out, words)
    assert out[0].isfinite().nonzero().flatten().tolist() == [3, 63]


@pytest.mark.parametrize("name", ["gumbel_noise_f32", "gumbel_noise_f16", "gumbel_noise_log"])
def test_noise_alone_samples(name: str) -> None:
    rows = LOGITS.expand(DRAWS, -1)
    rows = rows.softmax(-1) if name == "gumbel_noise_log" else rows
    noisy = torch.empty(DRAWS, SIZE)
    getattr(sampling, name)(rows, noisy, 3)
    counts = noisy.argmax(-1).bincount(minlength=SIZE) / DRAWS
    assert counts.tolist() == pytest.approx(probabilities(SIZE), abs=0.03)


def test_impossible_tokens_stay_impossible() -> None:
    noisy = torch.empty(1, 2)
    sampling.gumbel_noise_log(torch.tensor([[0.0, 1.0]]), noisy, 3)
    assert noisy[0, 0] == -math.inf


def test_adaptive_p_prefers_the_probability_it_aims_at() -> None:
    chosen = torch.zeros(3)
    probabilities = torch.tensor([[0.7, 0.3, 0.0]])
    for seed in range(300):
        noisy = torch.empty(1, 3)
        sampling.adaptivep_gumbel_noise_f32(probabilities, noisy, seed, 0.3, 1 / 0.3, 5.0, 10.0)
        chosen[noisy.argmax()] += 1
    # Expected logits: 5 - 10 d^2 / (d + 1) with d = 0.4 / 0.3, and 5
    d = 0.4 / 0.3
    first = math.exp(-10 * d * d / (d + 1))
    assert (chosen / 300).tolist() == pytest.approx([first / (1 + first), 1 / (1 + first), 0.0], abs=0.02)
