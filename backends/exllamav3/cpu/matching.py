"""Comparing tokens with tokens, and text with stop and banned strings: strings.cpp."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["count_match_tensor", "partial_strings_match"]

NO_MATCH = -1
PARTIAL_MATCH = -2


def count_match_tensor(a: Tensor, b: Tensor, max_a: int) -> int:
    """How many leading tokens are the same, looking at no more than `max_a`.

    Args:
        a: tokens of any shape, int64; b is (1, tokens) alike.
    """
    limit = min(max_a, b.shape[1], a.numel())
    # Asked of every cached page, hardly one of which begins alike; torch takes three times as long to find that out.
    ours, theirs = a.numpy().reshape(-1)[:limit], b.numpy().reshape(-1)[:limit]
    if limit <= 0 or ours[0] != theirs[0]:
        return 0
    differences = np.flatnonzero(ours != theirs)
    return int(differences[0]) if differences.size else limit


def partial_strings_match(match: ReadableBuffer, offsets: ReadableBuffer, strings: ReadableBuffer) -> int:
    """Where the first of several strings occurs in a text.

    Args:
        match: the text, as UTF-32 code units.
        offsets: uint32 byte offsets into `strings`, one more than there are strings.
        strings: the strings, as UTF-32 code units.

    Returns:
        The index of the earliest full match; -2 where a string that may still complete beyond the end of the text
        begins before any full match; -1 otherwise.
    """
    text, bounds, units = _words(match), _words(offsets), _words(strings)
    none = len(text) + 1
    full = partial = none
    for begin, end in itertools.pairwise(bounds):
        string = units[begin // 4 : end // 4]
        if not string:
            continue
        for start in range(min(len(text), full, partial)):
            overlap = min(len(string), len(text) - start)
            if text[start : start + overlap] == string[:overlap]:
                if overlap == len(string):
                    full = start
                else:
                    partial = start
                break
    if partial < full:
        return PARTIAL_MATCH
    return full if full < none else NO_MATCH


def _words(buffer: ReadableBuffer) -> list[int]:
    return memoryview(buffer).cast("B").cast("I").tolist()
