"""Events of an answer become blocks that begin and end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.generation import (
    Echo,
    Event,
    Finish,
    Prefill,
    ReasoningDelta,
    SampledLogprob,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from common.parsing.events import AnswerReader
from common.parsing.formats.base import Call
from common.parsing.formats.hermes import Hermes
from common.parsing.formats.qwen_xml import QwenXml
from common.parsing.tags import TagDialect
from endpoints.blocks import Block, BlockDelta, BlockEnded, BlockEvent, Blocks, BlockStarted
from tests.common.parsing.answers import WITH_TOOLS, chunk_sizes, cut, texts_of

TAGS = ("<think>", "</think>")
DIALECT = TagDialect(TAGS, [QwenXml(), Hermes()])
CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
FINISH = Finish(reason="stop", eos_reason="stop_token", usage=Usage(prompt_tokens=1, completion_tokens=1))


def blocks_of(events: Iterable[Event]) -> list[BlockEvent]:
    blocks = Blocks()
    return [part for event in events for part in blocks.read(event)]


def test_each_run_of_a_kind_is_a_block() -> None:
    events: list[Event] = [
        Prefill(1, 2),
        Echo("x", [1]),
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        TextDelta("c"),
        ToolCallDelta(0, "call_1", "ls"),
        ToolCallDelta(0, arguments='{"path"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallEnd(0, complete=True),
        ToolCallDelta(1, "call_2", "ls", "{}"),
        ToolCallEnd(1, complete=True),
        TextDelta("d"),
        FINISH,
    ]
    thought, text, last = Block(0, "thought"), Block(1, "text"), Block(4, "text")
    first, second = Block(2, "call", "call_1", "ls"), Block(3, "call", "call_2", "ls")
    assert blocks_of(events) == [
        BlockStarted(thought), BlockDelta(thought, "a"), BlockDelta(thought, "b"), BlockEnded(thought),
        BlockStarted(text), BlockDelta(text, "c"), BlockEnded(text),
        BlockStarted(first), BlockDelta(first, '{"path"'), BlockDelta(first, ": 1}"), BlockEnded(first),
        BlockStarted(second), BlockDelta(second, "{}"), BlockEnded(second),
        BlockStarted(last), BlockDelta(last, "d"), BlockEnded(last),
    ]  # fmt: skip


@pytest.mark.parametrize("event", [TextDelta("", [1]), ReasoningDelta(""), FINISH])
def test_nothing_makes_no_block(event: Event) -> None:
    assert blocks_of([event]) == []


def test_a_call_that_is_broken_off_is_followed_by_its_text() -> None:
    call, text = Block(0, "call", "call_1", "ls"), Block(1, "text")
    events: list[Event] = [ToolCallDelta(0, "call_1", "ls"), ToolCallEnd(0, complete=False), TextDelta("<t"), FINISH]
    assert blocks_of(events) == [
        BlockStarted(call), BlockEnded(call, complete=False), BlockStarted(text), BlockDelta(text, "<t"),
        BlockEnded(text),
    ]  # fmt: skip


def test_log_probabilities_come_with_their_text() -> None:
    logprobs = [SampledLogprob(1, "a", b"a", -0.5)]
    assert blocks_of([TextDelta("a", [1], logprobs)])[1] == BlockDelta(Block(0, "text"), "a", logprobs)


@given(
    texts_of([*TAGS, CALL, "<tool_call>\n", "<function=ls>\n", "</tool_call>"]),
    chunk_sizes,
    st.sampled_from(["stop", "length"]),
)
def test_blocks_are_the_answer(text: str, sizes: Sequence[int], reason: Literal["stop", "length"]) -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    finish = Finish(reason=reason, usage=FINISH.usage)
    read = [*(event for chunk in cut(text, sizes) for event in reader.read(TextDelta(chunk))), *reader.read(finish)]
    joined = {"thought": "", "text": ""}
    calls: list[Call] = []
    open_block: Block | None = None
    count, pieces = 0, ""
    for part in blocks_of(read):
        match part:
            case BlockStarted(block):
                assert open_block is None
                assert block.index == count
                open_block, count, pieces = block, count + 1, ""
            case BlockDelta(block, piece):
                assert block == open_block
                assert piece
                pieces += piece
            case BlockEnded(block, complete):
                assert block == open_block
                assert complete or block.kind == "call"
                open_block = None
                if block.kind != "call":
                    assert pieces
                    joined[block.kind] += pieces
                elif complete:
                    calls.append(Call(block.name, pieces, block.call_id))
    assert open_block is None
    assert (joined["text"], joined["thought"], calls) == (reader.content, reader.reasoning, reader.calls)
