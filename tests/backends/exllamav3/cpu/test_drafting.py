from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.cpu.drafting import BC_SAM, FrozenSAMCursor


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


# --- a corpus ---------------------------------------------------------------------------------------------------------

CORPUS_TOKENS = st.integers(0, 2)


def cursor(corpus: list[int]) -> FrozenSAMCursor:
    automaton = BC_SAM()
    automaton.accept_tensor(torch.tensor([corpus]))
    boundaries = [index for index, token in enumerate(corpus) if token == -1]
    arrays = [*automaton.export_csr(), torch.tensor(corpus), torch.tensor(boundaries)]
    return FrozenSAMCursor([byte_planes(array) for array in arrays])


def byte_planes(array: torch.Tensor) -> torch.Tensor:
    return array.to(torch.int32).view(-1, 1).view(torch.uint8).T.contiguous().flatten()


def continued(corpus: list[int], history: list[int], minimum: int, length: int) -> tuple[int, list[int]]:
    """What follows the first occurrence of the longest suffix."""
    for matched in range(len(history), 0, -1):
        for end in range(matched, len(corpus) + 1):
            if corpus[end - matched : end] == history[len(history) - matched :]:
                following = corpus[end:][:length]
                until = following.index(-1) if -1 in following else len(following)
                return matched, following[:until] if matched >= minimum else []
    return 0, []


@given(
    st.lists(st.lists(CORPUS_TOKENS, max_size=12), min_size=1, max_size=4),
    st.lists(CORPUS_TOKENS | st.just(7), max_size=20),
    st.integers(1, 3),
)
def test_a_corpus_is_followed(documents: list[list[int]], history: list[int], minimum: int) -> None:
    corpus = [token for document in documents for token in (*document, -1)]
    frozen = cursor(corpus)
    for count in range(1, len(history) + 1):
        matched, draft = frozen.draft(torch.tensor([history[:count]]), minimum, 4)
        assert (matched, draft[0].tolist()) == continued(corpus, history[:count], minimum, 4)
    short = torch.tensor([history[:1]], dtype=torch.long)
    assert frozen.draft(short, 1, 4)[0] == continued(corpus, history[:1], 1, 4)[0]  # from the start again


def test_tokens_beyond_the_root_table_are_found_among_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.exllamav3.cpu.drafting.MOST_ROOT_TOKENS", 2)
    matched, draft = cursor([5, 1, 9, 3, -1]).draft(torch.tensor([[5, 1]]), 1, 9)
    assert (matched, draft.tolist()) == (2, [[9, 3]])


def test_what_is_no_token_ends_a_match() -> None:
    """The separator of documents is -1, too: nothing may go on across it."""
    frozen = cursor([5, 6, 7, -1, 5, 6, 8, -1])
    matched, draft = frozen.draft(torch.tensor([[7, -1, 5, 6]]), 1, 4)
    assert (matched, draft.tolist()) == (2, [[7]])
    assert frozen.draft(torch.tensor([[7, -1, 5, 6, -1]]), 1, 4)[0] == 0
