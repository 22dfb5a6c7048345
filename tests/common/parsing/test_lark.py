"""Patterns say what they should, in the syntax that Python and Rust share."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from common.parsing.lark import containing, escaped, string, without


@pytest.mark.parametrize(
    "strings",
    [[], ["<"], ["</p>", "<q=", "</r>"], ["<ab>", "<ac>", "[x]"], ["<a", "<ab"], ["ab", "b"], ["<|a|>", "<|b"], ["]]"]],
)
def test_texts_without_some_strings(strings: list[str]) -> None:
    pattern = without(strings)
    if pattern is None:
        assert strings in (["ab", "b"], ["]]"])
        return
    letters = sorted({*"".join(strings), "é", "\n"})
    found = re.compile(pattern, re.DOTALL)
    for length in range(6 if len(letters) < 8 else 5):
        for text in map("".join, itertools.product(letters, repeat=length)):
            assert bool(found.fullmatch(text)) == all(part not in text for part in strings), text


@pytest.mark.parametrize("text", ["a", "", "".join(map(chr, range(128))), 'é😀 "</p>"\\n'])
def test_what_is_escaped_matches_itself_alone(text: str) -> None:
    assert re.fullmatch(escaped(text), text)
    assert not re.search(r"(?<!\\)/|[\x00-\x1f]", escaped(text))
    assert json.loads(string(text)) == text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("b", ["abc", "b\n"], ["ac"]),
        ("^b", ["bc"], ["ab"]),
        ("b$", ["ab"], ["bc"]),
        ("^(a|b)$", ["a", "b"], ["ab"]),
        ("^a|b$", ["ac", "cb"], ["cac"]),
        (r"^\|[|/^$]\/$", ["|//", "||/", "|$/"], ["|a/"]),
        ("^a\n/$", ["a\n/"], ["a/"]),
        ("[]a]b", ["]b"], ["b"]),
        ("", ["", "a"], []),
    ],
)
def test_patterns_are_searched_for(pattern: str, good: list[str], bad: list[str]) -> None:
    whole = re.compile(containing(pattern))
    assert [text for text in good if not whole.fullmatch(text)] == []
    assert [text for text in bad if whole.fullmatch(text)] == []
    assert not re.search(r"(?<!\\)/|\n", containing(pattern))


@pytest.mark.parametrize("pattern", ["(^a)", "a^", "$a", "(a$|b)"])
def test_anchors_within_a_pattern_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="anchor"):
        containing(pattern)
