"""Fill-in-the-middle prompts of the families in use."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from common.errors import Unsupported
from common.fim import FAMILIES, fim_prompt, fim_tokens


class Token(NamedTuple):
    text: str


def tokens(*texts: str) -> list[Token]:
    return [Token(text) for text in ("<s>", "</s>", *texts)]


@pytest.mark.parametrize(
    ("texts", "prompt"),
    [
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>B<fim_suffix>A<fim_middle>"),
        (("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"), "<|fim_prefix|>B<|fim_suffix|>A<|fim_middle|>"),
        (("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>B<｜fim▁hole｜>A<｜fim▁end｜>"),
        (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>B▁<SUF>A▁<MID>"),
        (("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"), "<|code_prefix|>B<|code_suffix|>A<|code_middle|>"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]A[PREFIX]B"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>A<[fim-prefix]>B<[fim-middle]>"),
    ],
)
def test_the_prompt_of_a_family(texts: tuple[str, ...], prompt: str) -> None:
    assert fim_prompt("B", "A", tokens(*texts)) == prompt


def test_each_family_is_told_by_its_own_tokens() -> None:
    for family in FAMILIES:
        assert fim_tokens(tokens(*filter(None, family[:3]))) is family


@pytest.mark.parametrize("texts", [(), ("<fim_prefix>", "<fim_suffix>"), ("[SUFFIX]",)])
def test_a_tokenizer_without_all_of_the_tokens_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported) as raised:
        fim_prompt("B", "A", tokens(*texts))
    assert raised.value.param == "suffix"
