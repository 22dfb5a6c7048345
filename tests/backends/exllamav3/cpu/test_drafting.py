from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.cpu.drafting import BC_SAM


def earlier_occurrence(tokens: list[int]) -> tuple[int, int]:
    """Of the longest suffix that ends before the last token does, the first occurrence."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == suffix:
                return start, start + length
    return -1, -1


@given(st.lists(st.integers(0, 2), max_size=40))
def test_every_token_is_matched_with_what_came_before(tokens: list[int]) -> None:
    automaton = BC_SAM()
    for count in range(1, len(tokens) + 1):
        assert automaton.accept(tokens[count - 1]) == earlier_occurrence(tokens[:count])
    assert automaton.length() == len(tokens)


def test_a_longer_sequence_continues_and_a_shorter_one_starts_afresh() -> None:
    automaton = BC_SAM()
    assert automaton.accept_tensor(torch.tensor([[1, 2, 3]])) == (-1, -1)
    assert automaton.accept_tensor(torch.tensor([[1, 2, 3, 1, 2]])) == (0, 2)
    assert automaton.accept_tensor(torch.tensor([[7, 7]])) == (0, 1)
    assert automaton.length() == 2
    automaton.reset()
    assert automaton.accept(7) == (-1, -1)
