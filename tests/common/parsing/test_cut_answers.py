"""Answers that a limit of tokens cuts off inside a mark."""

from __future__ import annotations

import pytest

from common.parsing.formats.base import Call, ToolFormat
from common.parsing.formats.registry import FORMATS
from common.parsing.harmony import HarmonyDialect
from common.parsing.pieces import CallEnd, Thought
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import content_of, read


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_half_a_mark_behind_a_complete_call_is_layout(format: ToolFormat) -> None:
    written = format.write([Call("ls", '{"path": "/srv"}')])
    for length in range(1, len(written)):
        pieces = read(TagDialect(None, [format]), written[:length], ending="cut")
        if CallEnd() in pieces:
            assert content_of(pieces) == ""
        else:
            assert content_of(pieces) == written[:length]


def test_text_behind_a_complete_call_stays() -> None:
    dialect = TagDialect(None, FORMATS)
    pieces = read(dialect, "<tool_call>\n<function=ls>\n</function>\n</b", ending="cut")
    assert CallEnd() in pieces
    assert content_of(pieces) == "</b"


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
HEADER = "<|start|>assistant<|channel|>final"


@pytest.mark.parametrize("length", range(1, len(HEADER) + 1))
def test_half_a_header_of_harmony_is_layout(length: int) -> None:
    pieces = read(HarmonyDialect(), THOUGHT + HEADER[:length], ending="cut")
    assert pieces == [Thought("Hm.")]


@pytest.mark.parametrize("text", ["<|channel|>", "<|channel|>analysis", "<|channel|>commentary to=functions.ls"])
def test_half_a_header_alone_is_layout(text: str) -> None:
    assert read(HarmonyDialect(), text, ending="cut") == []
