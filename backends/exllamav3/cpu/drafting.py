"""The suffix automaton behind n-gram drafting."""

from __future__ import annotations

from torch import Tensor

__all__ = ["BC_SAM"]

NO_MATCH = (-1, -1)


class BC_SAM:
    """Finds, after each token, where the longest suffix that occurred before did so first.

    The usual online construction (Blumer et al. 1985): a state is a class of substrings with the same end positions.
    `_min_end` is the first of those. The match is advanced before the token is added, so it sees only what came before.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, reserve_tokens: int = 0) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._max_length = [0]
        self._min_end = [-1]
        self._last = 0
        self._match_state = 0
        self._match_length = 0
        self._position = 0

    def length(self) -> int:
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
        """Add what a sequence has beyond the tokens seen; a shorter one starts afresh."""
        ids = tokens.view(-1)
        if ids.numel() < self._position:
            self.reset()
        found = NO_MATCH
        for token in ids[self._position :].tolist():
            found = self.accept(token)
        return found

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
