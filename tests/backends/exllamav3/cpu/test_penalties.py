from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.cpu import penalties

LOGITS = [[2.0, -1.0, 0.5, -math.inf, 3.0]]


def strength(distance: int, sustain: int, decay: int) -> float:
    """How strongly a token so far back counts."""
    if distance <= sustain:
        return 1.0
    return max(0.0, 1.0 - (distance - sustain) / decay) if decay else 0.0


def strengths(past: list[int], token: int, sustain: int, decay: int) -> list[float]:
    return [strength(len(past) - i, sustain, decay) for i, other in enumerate(past) if other == token]


RANGES = [(100, 0), (2, 0), (1, 3), (0, 4)]
PAST = [4, 0, 3, 1, 0]


@pytest.mark.parametrize(("sustain", "decay"), RANGES)
def test_repetition_penalty(sustain: int, decay: int) -> None:
    out = torch.empty(1, 5)
    penalties.apply_rep_pens(torch.tensor(LOGITS), out, torch.tensor([PAST]), 1.5, sustain, decay)
    for token, logit in enumerate(LOGITS[0]):
        share = max(strengths(PAST, token, sustain, decay), default=0.0)
        penalised = logit / 1.5 if logit > 0 else logit * 1.5
        expected = logit if math.isinf(logit) else logit + share * (penalised - logit)
        assert out[0, token].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("sustain", "decay"), RANGES)
def test_presence_and_frequency_penalties(sustain: int, decay: int) -> None:
    out = torch.empty(1, 5)
    penalties.apply_pres_freq_pens(torch.tensor(LOGITS), out, torch.tensor([PAST]), 0.7, 0.2, sustain, decay)
    for token, logit in enumerate(LOGITS[0]):
        counted = strengths(PAST, token, sustain, decay)
        expected = logit - 0.2 * sum(counted) - 0.7 * max(counted, default=0.0)
        assert out[0, token].item() == pytest.approx(expected, rel=1e-5)


def test_penalties_may_work_in_place_and_ignore_foreign_ids() -> None:
    logits = torch.tensor(LOGITS)
    penalties.apply_rep_pens(logits, logits, torch.tensor([[0, -1, 2**40]]), 2.0, 10, 0)
    assert logits[0].tolist() == [1.0, -1.0, 0.5, -math.inf, 3.0]


def dry(past: list[int], breakers: list[int] | None = None, **options: int) -> list[float]:
    """The penalties in units of the multiplier, with base 2."""
    settings = {"allowed_length": 2, "range": 0, "max_exponent": 0, "match_cap": 1000} | options
    mask = None
    if breakers is not None:
        mask = torch.zeros(10, dtype=torch.bool)
        mask[breakers] = True
    out = torch.empty(1, 10)
    penalties.dry_penalty(torch.zeros(1, 10).half(), out, torch.tensor([past]), mask, None, None, 0.5, 2.0, **settings)
    return (out[0] / -0.5).tolist()


def only(token: int, value: float) -> list[float]:
    return [value if index == token else 0.0 for index in range(10)]


NOTHING = [0.0] * 10


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([1, 2, 3, 1, 2], only(3, 1.0)),  # 1 2 was followed by 3
        ([5, 1, 2, 3, 5, 1, 2], only(3, 2.0)),  # one longer
        ([1, 2, 3, 7, 2], NOTHING),  # a single token is allowed
        ([1, 2, 3, 1, 2, 4, 1, 2], [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ([6, 6, 6, 6], only(6, 2.0)),
        ([1, 2], NOTHING),
    ],
)
def test_dry_penalises_the_continuation_of_a_repetition(past: list[int], expected: list[float]) -> None:
    assert dry(past) == expected


def test_dry_limits() -> None:
    past = [5, 1, 2, 3, 8, 5, 1, 2]
    assert dry(past) == only(3, 2.0)
    assert dry(past, max_exponent=1, match_cap=0) == only(3, 2.0)
    assert dry([4, *past[:5], 4, *past[5:]], max_exponent=1) == only(3, 2.0)
    assert dry(past, match_cap=2) == only(3, 1.0)
    assert dry(past, range=6) == NOTHING  # the first occurrence is out of range
    assert dry(past, allowed_length=4) == NOTHING


def test_dry_that_allows_no_repetition_counts_all_tokens_but_the_first() -> None:
    assert dry([], allowed_length=0) == NOTHING
    assert dry([1], allowed_length=0) == NOTHING
    assert dry([4, 2, 1], allowed_length=0) == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_dry_breakers() -> None:
    past = [5, 1, 2, 3, 8, 5, 1, 2]
    assert dry(past, breakers=[5]) == only(3, 1.0)  # what is matched ends there
    assert dry(past, breakers=[1]) == NOTHING
    assert dry(past, breakers=[3]) == NOTHING  # never penalised


@given(st.lists(st.integers(0, 2), max_size=30))
def test_dry_knows_how_many_tokens_repeat(recent: list[int]) -> None:
    for age, count in enumerate(penalties._repetitions(recent)[1:], start=1):
        assert count == next((n for n, token in enumerate(recent[age:]) if token != recent[n]), len(recent) - age)


def test_dry_takes_no_longer_for_what_repeats_all_the_time() -> None:
    """Each token is compared a few times, not with all before it."""
    compared = 0

    class Token(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    penalties._repetitions([Token(7)] * 1000)
    assert compared < 3000


def test_dry_counts_rows_each_for_itself_and_may_work_in_place() -> None:
    past, logits = torch.tensor([[1, 2, 3, 1, 2], [5, 6, 5, 6, 5]]), torch.zeros(2, 8)
    penalties.dry_penalty(logits, logits, past, None, None, None, 0.5, 2.0, 2, 0, 0, 1000)
    assert logits.nonzero().tolist() == [[0, 3], [1, 6]]
    assert logits[logits < 0].tolist() == [-0.5, -1.0]


def test_dry_ignores_foreign_ids() -> None:
    """Those of images lie beyond the vocabulary."""
    assert dry([10**9, 2, 3, 10**9, 2]) == only(3, 1.0)
    assert dry([1, 2, 10**9, 1, 2], breakers=[]) == NOTHING


def test_dry_beyond_all_numbers_forbids_the_token() -> None:
    out = torch.empty(1, 4)
    past = torch.tensor([[1] * 2000])
    penalties.dry_penalty(torch.zeros(1, 4), out, past, None, None, None, 1.0, 10.0, 2, 0, 0, 1500)
    assert out[0].tolist() == [0.0, -math.inf, 0.0, 0.0]


def test_several_rows_are_refused_where_penalties_are_for_one() -> None:
    logits, past = torch.zeros(2, 5), torch.tensor([[1], [2]])
    with pytest.raises(ValueError, match="one sequence at a time, not 2"):
        penalties.apply_rep_pens(logits, logits, past, 1.5, 10, 0)
    with pytest.raises(ValueError, match="one sequence at a time, not 2"):
        penalties.apply_pres_freq_pens(logits, logits, past, 1.5, 0.5, 10, 0)
