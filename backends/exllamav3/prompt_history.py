"""The prompts that an engine has served lately, to tell where a new one departs from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.caching import EVERYBODY

TokenArray: TypeAlias = NDArray[np.int64]  # ids of images grow without end

MAX_OWNERS = 64
MAX_ENTRIES = 64  # of one owner
MAX_TOKENS = 8_000_000  # of all together; 8 bytes each


@dataclass(frozen=True)
class Nearest:
    """An earlier prompt with its answer, and how many tokens at its beginning are those of the prompt asked for."""

    ids: TokenArray
    common: int


class PromptHistory:
    """Token ids of prompts with their answers, by owner. What was unused for longest goes first.

    An owner's entry that a later one goes on from is replaced by it, so that a conversation is one entry.
    """

    def __init__(
        self, *, max_owners: int = MAX_OWNERS, max_entries: int = MAX_ENTRIES, max_tokens: int = MAX_TOKENS
    ) -> None:
        """
        Args:
            max_entries: of one owner.
            max_tokens: of all together. One entry is kept, however long.
        """
        self._max_owners = max_owners
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._entries: dict[str, list[TokenArray]] = {}  # owners and their entries, the latest last
        self._tokens = 0

    def remember(self, owner: str, ids: Sequence[int]) -> None:
        """Add a prompt and as much of its answer as has been processed."""
        if not ids:
            return
        new = np.asarray(ids, dtype=np.int64)
        entries = self._entries.pop(owner, [])
        kept = []
        for entry in entries:
            common = common_length(entry, new)
            if common == len(new):  # what is there goes further, or as far
                new = entry
            elif common < len(entry):
                kept.append(entry)
        self._entries[owner] = [*kept, new]
        self._tokens += _count(self._entries[owner]) - _count(entries)
        self._shrink()

    def nearest(self, owner: str, ids: Sequence[int]) -> Nearest | None:
        """The owner's entry that begins most like a prompt, the latest of several; None where none begins like it.

        `EVERYBODY` sees those of all owners.
        """
        asked = np.asarray(ids, dtype=np.int64)
        owners = self._entries if owner == EVERYBODY else [owner]
        best: Nearest | None = None
        for entry in (entry for name in owners for entry in self._entries.get(name, [])):
            common = common_length(entry, asked)
            if common and (best is None or common >= best.common):
                best = Nearest(entry, common)
        return best

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def _shrink(self) -> None:
        while len(self._entries) > self._max_owners:
            oldest = next(iter(self._entries))
            self._tokens -= _count(self._entries.pop(oldest))
        latest = next(reversed(self._entries))
        while len(self._entries[latest]) > self._max_entries:
            self._tokens -= len(self._entries[latest].pop(0))
        while self._tokens > self._max_tokens:
            oldest = next(iter(self._entries))
            if oldest == latest and len(self._entries[latest]) == 1:
                return
            self._tokens -= len(self._entries[oldest].pop(0))
            if not self._entries[oldest]:
                del self._entries[oldest]


def common_length(one: TokenArray, other: TokenArray) -> int:
    """How many tokens at the beginning are the same."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _count(entries: Iterable[TokenArray]) -> int:
    return sum(map(len, entries))
