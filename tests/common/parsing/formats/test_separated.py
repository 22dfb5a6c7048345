from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.parsing.formats.separated import separated
from common.parsing.grammar import GrammarWriter

BYTES = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("required", [*itertools.product([False, True], repeat=3), (), (True,), (False,)])
def test_required_members_stand_and_all_keep_their_order(required: Sequence[bool]) -> None:
    names = "abc"[: len(required)]
    writer = GrammarWriter({})
    members = [(writer.literal(name), is_required) for name, is_required in zip(names, required, strict=True)]
    grammar = writer.text(separated(members, ", ", writer))
    for length in range(len(names) + 1):
        for chosen in itertools.permutations(names, length):
            right = list(chosen) == sorted(chosen) and all(
                name in chosen for name, is_required in zip(names, required, strict=True) if is_required
            )
            assert accepts(grammar, ", ".join(chosen)) == right, chosen
    assert not accepts(grammar, ", a")
    assert not accepts(grammar, "a, ")
