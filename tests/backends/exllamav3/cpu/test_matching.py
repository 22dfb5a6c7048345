from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.cpu.matching import count_match_tensor, partial_strings_match


def match(text: str, strings: list[str]) -> int:
    encoded = [string.encode("utf-32-le") for string in strings]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return partial_strings_match(text.encode("utf-32-le"), offsets.tobytes(), b"".join(encoded))


@pytest.mark.parametrize(
    ("text", "strings", "result"),
    [
        ("hello world", ["wor"], 6),
        ("hello world", ["xyz", "o"], 4),
        ("hello world", ["world!"], -2),
        ("hello world", ["worse"], -1),
        ("hello world", ["lo", "hello"], 0),
        ("stop sto", ["stop"], 0),  # a full match before the partial one
        ("sto stop", ["stop it"], -2),
        ("ab", ["b", "abc"], -2),  # a partial match that begins before the full one
        ("naïve ☃", ["☃"], 6),
        ("", ["a"], -1),
        ("text", [], -1),
    ],
)
def test_strings_in_a_text(text: str, strings: list[str], result: int) -> None:
    assert match(text, strings) == result


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_strings(text: str, strings: list[str]) -> None:
    full = [text.find(string) for string in strings if string in text]
    partial = [
        start for string in strings for start in range(len(text)) if len(text) - start < len(string)
        if string.startswith(text[start:])
    ]  # fmt: skip
    result = match(text, strings)
    if not full and not partial:
        assert result == -1
    elif min(full, default=len(text)) == min(partial, default=len(text)):
        assert result in (-2, min(full))  # the string listed first decides
    elif min(partial, default=len(text)) < min(full, default=len(text)):
        assert result == -2
    else:
        assert result == min(full)


@pytest.mark.parametrize(
    ("a", "b", "limit", "count"),
    [
        ([1, 2, 3], [1, 2, 3], 10, 3),
        ([1, 2, 3], [1, 2, 4], 10, 2),
        ([1, 2, 3], [9], 10, 0),
        ([1, 2, 3], [1, 2, 3, 4], 2, 2),
        ([1, 2, 3], [1, 2, 3], 0, 0),
        ([1, 2], [], 5, 0),
    ],
)
def test_leading_tokens_in_common(a: list[int], b: list[int], limit: int, count: int) -> None:
    first, second = torch.tensor([a]), torch.tensor([b], dtype=torch.long)
    assert count_match_tensor(first, second, limit) == count
