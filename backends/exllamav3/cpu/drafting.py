"""The suffix automata behind n-gram drafting: one that grows with a sequence, and frozen ones of a corpus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["BC_SAM", "FrozenSAMCursor"]

Planes = npt.NDArray[np.uint8]  # (4, n): the lowest bytes of n int32, then the next ones

NO_MATCH = (-1, -1)
ROOT = 0
NOWHERE = -1
MOST_ROOT_TOKENS = 1 << 20  # a frozen automaton has a table of the root's edges for ids below this


class BC_SAM:
    """Finds, after each token, where the longest suffix that occurred before did so first.

    The usual online construction (Blumer et al. 1985): a state is a class of substrings with the same end positions.
    `_min_end` is the first of those. The match is advanced before the token is added, so it sees only what came before.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, reserve_tokens: int = 0) -> None:
        """Forget all tokens. Memory needs no reserving: lists grow."""
        self._edges: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._max_length = [0]
        self._min_end = [-1]
        self._last = 0
        self._match_state = 0
        self._match_length = 0
        self._position = 0

    def length(self) -> int:
        """Of the sequence, in tokens."""
        return self._position

    def accept(self, token: int) -> tuple[int, int]:
        """Add a token; returns (start, end) of the earlier occurrence, (-1, -1) without one."""
        self._advance(token)
        found = NO_MATCH
        if self._match_length:
            end = self._min_end[self._match_state] + 1
            found = (end - self._match_length, end)
        self._extend(token)
        return found

    def accept_tensor(self, tokens: Tensor) -> tuple[int, int]:
        """Add what a sequence has beyond the tokens seen; a shorter one starts afresh.

        Args:
            tokens: (1, tokens) or (tokens,) int64.

        Returns:
            Of its last token what `accept` does; (-1, -1) where there was none to add.
        """
        ids = tokens.view(-1)
        if ids.numel() < self._position:
            self.reset()
        found = NO_MATCH
        for token in ids[self._position :].tolist():
            found = self.accept(token)
        return found

    def export_csr(self) -> list[Tensor]:
        """The automaton as a corpus file holds it, seven int32 tensors.

        By state: suffix link, length of the longest string, first end position, and (one more) where its edges begin.
        By edge, those of a state sorted by token: token and target. By token: the root's target, -1 for none.
        """
        edges = [sorted(by_token.items()) for by_token in self._edges]
        root = self._edges[ROOT]
        size = min(max(root, default=-1) + 1, MOST_ROOT_TOKENS)
        arrays = (
            self._link,
            self._max_length,
            self._min_end,
            [0, *accumulate(map(len, edges))],
            [token for of_state in edges for token, _ in of_state],
            [target for of_state in edges for _, target in of_state],
            [root.get(token, NOWHERE) for token in range(size)],
        )
        return [torch.tensor(array, dtype=torch.int32) for array in arrays]

    def _advance(self, token: int) -> None:
        while self._match_state and token not in self._edges[self._match_state]:
            self._match_state = self._link[self._match_state]
            self._match_length = min(self._match_length, self._max_length[self._match_state])
        target = self._edges[self._match_state].get(token)
        if target is None:
            self._match_state = self._match_length = 0
        else:
            self._match_state = target
            self._match_length += 1

    def _extend(self, token: int) -> None:
        current = self._new_state(self._max_length[self._last] + 1, 0, self._position, {})
        state = self._last
        while state != -1 and token not in self._edges[state]:
            self._edges[state][token] = current
            state = self._link[state]
        if state != -1:
            self._link[current] = self._split(state, token)
        self._last = current
        self._position += 1

    def _split(self, state: int, token: int) -> int:
        """The state for exactly the strings of `state` followed by `token`, cloned from the longer one if need be."""
        target = self._edges[state][token]
        if self._max_length[state] + 1 == self._max_length[target]:
            return target
        clone = self._new_state(
            self._max_length[state] + 1, self._link[target], self._min_end[target], dict(self._edges[target])
        )
        while state != -1 and self._edges[state].get(token) == target:
            self._edges[state][token] = clone
            state = self._link[state]
        self._link[target] = clone
        return clone

    def _new_state(self, max_length: int, link: int, min_end: int, edges: dict[int, int]) -> int:
        self._max_length.append(max_length)
        self._link.append(link)
        self._min_end.append(min_end)
        self._edges.append(edges)
        return len(self._link) - 1


class FrozenSAMCursor:
    """Follows one sequence through the automaton of a corpus, which many of these share.

    Args:
        sections: of the corpus file, each the uint8 bytes of an int32 array, the lowest of all its elements first: what
            `BC_SAM.export_csr()` gives, then the tokens of the corpus, with -1 behind every document, and where those
            stand.
    """

    def __init__(self, sections: Sequence[Tensor]) -> None:
        planes = [section.view(4, section.numel() // 4).numpy() for section in sections]
        self._links, self._lengths, self._ends, self._offsets, self._tokens, self._targets, self._root = planes[:7]
        self._corpus = planes[7]
        self._restart()

    def _restart(self) -> None:
        self._state = ROOT
        self._matched = 0  # tokens
        self._position = 0

    def draft(self, history: Tensor, minimum: int, length: int) -> tuple[int, Tensor]:
        """What followed the longest suffix of a sequence where the corpus has it first.

        Args:
            history: the sequence so far, (1, tokens) int64. It continues that of the last call, or is shorter.
            minimum: no draft for a match of fewer tokens.
            length: of the draft at most; it also ends with the document.

        Returns:
            Tokens that match, and the draft, (1, tokens) int64.
        """
        ids = history.view(-1)
        if ids.numel() < self._position:
            self._restart()
        for token in ids[self._position :].tolist():
            self._advance(token)
        self._position = ids.numel()
        draft: list[int] = []
        if self._matched >= minimum:
            end = _word(self._ends, self._state) + 1
            for index in range(end, min(end + length, self._corpus.shape[1])):
                token = _word(self._corpus, index)
                if token < 0:
                    break
                draft.append(token)
        return self._matched, torch.tensor([draft], dtype=torch.long)

    def _advance(self, token: int) -> None:
        if token < 0:  # in the corpus, -1 separates documents
            self._state, self._matched = ROOT, 0
            return
        target = self._next(token)
        while target == NOWHERE and self._state != ROOT:
            self._state = _word(self._links, self._state)
            self._matched = min(self._matched, _word(self._lengths, self._state))
            target = self._next(token)
        if target == NOWHERE:
            self._matched = 0
        else:
            self._state = target
            self._matched += 1

    def _next(self, token: int) -> int:
        if self._state == ROOT and token < self._root.shape[1]:
            return _word(self._root, token)
        first, end = (_word(self._offsets, self._state + step) for step in (0, 1))
        edge = bisect_left(range(end), token, first, end, key=lambda index: _word(self._tokens, index))
        found = edge < end and _word(self._tokens, edge) == token
        return _word(self._targets, edge) if found else NOWHERE


def _word(planes: Planes, index: int) -> int:
    return int.from_bytes(planes[:, index].tobytes(), "little", signed=True)
