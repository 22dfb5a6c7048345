"""The engine's events become those that front ends render."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.generation import (
    Echo,
    Event,
    Finish,
    FinishReason,
    Prefill,
    ReasoningDelta,
    SampledLogprob,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from common.parsing.dialect import ReadOptions
from common.parsing.events import AnswerReader
from common.parsing.formats.hermes import Hermes
from common.parsing.formats.mistral_old import MistralOld
from common.parsing.formats.qwen_xml import QwenXml
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import TOOLS, WITH_TOOLS, chunk_sizes, cut, texts_of

TAGS = ("<think>", "</think>")
DIALECT = TagDialect(TAGS, [QwenXml(), Hermes()])
PLAIN = TagDialect(None, ())
USAGE = Usage(prompt_tokens=3, completion_tokens=5, reasoning_tokens=2)
CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
BROKEN = "<tool_call>\n<function=ls>\n<parameter=path>\n/sr"


def token(raw: bytes, token_id: int = 0) -> SampledLogprob:
    return SampledLogprob(token_id, raw.decode(errors="replace"), raw, -0.5)


def tokens(raws: Iterable[bytes]) -> TextDelta:
    """The delta of an engine that gives these tokens at once."""
    entries = [token(raw, index) for index, raw in enumerate(raws)]
    text = b"".join(entry.raw for entry in entries).decode(errors="replace")
    return TextDelta(text, [entry.token_id for entry in entries], entries)


def finish(reason: FinishReason = "stop", eos_reason: str = "stop_token") -> Finish:
    return Finish(reason=reason, eos_reason=eos_reason, usage=USAGE)


def read(reader: AnswerReader, events: Iterable[Event]) -> list[Event]:
    return [read for event in events for read in reader.read(event)]


def texts(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def entries(events: Sequence[Event]) -> list[str]:
    return [entry.token for event in events if isinstance(event, TextDelta) for entry in event.logprobs]


def test_an_answer_of_all_kinds() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    text = f"<think>\nplan\n</think>\n\nI look.\n{CALL}"
    *events, last = read(reader, [*map(TextDelta, cut(text, [7])), finish()])
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "plan"
    assert texts(events) == "I look."
    first, *deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    (call,) = reader.calls
    assert first == ToolCallDelta(index=0, id=call.id, name="ls")
    assert {(delta.index, delta.id, delta.name) for delta in deltas} == {(0, None, None)}
    assert "".join(delta.arguments for delta in deltas) == '{"path": "/srv"}' == call.arguments
    assert [event for event in events if isinstance(event, ToolCallEnd)] == [ToolCallEnd(0, complete=True)]
    assert last == Finish(reason="tool_calls", eos_reason="stop_token", usage=USAGE)
    assert (reader.text, reader.content, reader.reasoning) == (text, "I look.", "plan")


def test_other_events_pass_through() -> None:
    others: list[Event] = [Prefill(1, 2), Echo("x", [1])]
    assert read(AnswerReader(DIALECT, WITH_TOOLS), others) == others


@pytest.mark.parametrize(
    ("text", "reason", "eos_reason", "expected", "calls"),
    [
        ("Hi", "stop", "stop_token", "stop", 0),
        ("Hi", "length", "max_new_tokens", "length", 0),
        (CALL, "stop", "stop_token", "tool_calls", 1),
        (CALL, "stop", "end_filter", "tool_calls", 1),
        (CALL, "length", "max_new_tokens", "length", 1),
        (f"{CALL}\n{BROKEN}", "length", "max_new_tokens", "length", 1),
        (BROKEN, "stop", "stop_token", "tool_calls", 1),  # the model forgot to close it
        (BROKEN, "length", "max_new_tokens", "length", 0),
        (BROKEN, "stop", "stop_string", "stop", 0),
        (BROKEN, "stop", "loop_detected", "stop", 0),
    ],
)
def test_the_reason_is_that_of_the_engine_unless_calls_are_made(
    text: str, reason: FinishReason, eos_reason: str, expected: FinishReason, calls: int
) -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    last = read(reader, [TextDelta(text), finish(reason, eos_reason)])[-1]
    assert last == Finish(reason=expected, eos_reason=eos_reason, usage=USAGE)
    assert len(reader.calls) == calls


def test_a_broken_call_ends_and_its_text_follows() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    events = read(reader, [TextDelta(BROKEN), finish("length", "max_new_tokens")])
    assert ToolCallEnd(0, complete=False) in events
    assert texts(events) == reader.content == BROKEN
    assert reader.calls == []


def test_every_call_has_an_id_of_its_own() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    events = read(reader, [TextDelta(CALL * 3), finish()])
    ids = [event.id for event in events if isinstance(event, ToolCallDelta) and event.id]
    assert len(set(ids)) == 3
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert [call.id for call in reader.calls] == ids
    assert [event.index for event in events if isinstance(event, ToolCallEnd)] == [0, 1, 2]


def test_an_id_of_the_model_is_kept_once() -> None:
    reader = AnswerReader(TagDialect(None, [MistralOld()]), WITH_TOOLS)
    call = '{"name": "ls", "arguments": {}, "id": "abc123def"}'
    read(reader, [TextDelta(f"[TOOL_CALLS][{call}, {call}]"), finish()])
    first, second = (call.id for call in reader.calls)
    assert first == "abc123def"
    assert second != first


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_log_probabilities_stay_with_the_content() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    text = [
        b"<think>",
        b"plan",
        b"</think>",
        b"\n\n",
        b"Hi",
        b" the",
        b"re \n",
        b"<tool",
        b"bar>",
        b"\n",
        CALL.encode(),
    ]
    events = read(reader, [*(tokens([raw]) for raw in text), finish()])
    assert entries(events) == ["Hi", " the", "re \n", "<tool", "bar>"]
    for event in events:
        if isinstance(event, TextDelta):
            assert "".join(entry.token for entry in event.logprobs).strip() == event.text.strip()


def test_those_of_a_broken_call_come_with_its_text() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    text = [b"ok", b"\n", b"<tool_call>", b"\n<function", b"=ls>\n", b"<parameter=path>\n", b"/s"]
    events = read(reader, [*(tokens([raw]) for raw in text), finish("length", "max_new_tokens")])
    assert entries(events) == [raw.decode() for raw in text]


def test_a_token_on_the_border_counts_once() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    events = read(reader, [tokens([b"<think>a</", b"think>H", b"i"]), finish()])
    assert entries(events) == ["think>H", "i"]


def test_characters_may_take_several_tokens() -> None:
    smile = "☃".encode()
    raws = [b"a", smile[:1], smile[1:2], smile[2:] + b"b", b"c"]
    reader = AnswerReader(PLAIN, ReadOptions())
    events = read(reader, [tokens(raws), finish()])
    assert [entry.raw for event in events if isinstance(event, TextDelta) for entry in event.logprobs] == raws
    # An engine may give out halves without text.
    reader = AnswerReader(PLAIN, ReadOptions())
    halves = [TextDelta("", [1], [token(smile[:2])]), TextDelta("☃b", [2], [token(smile[2:] + b"b")])]
    events = read(reader, [tokens([b"a"]), *halves, tokens([b"c"]), finish()])
    assert texts(events) == "a☃bc"
    assert [len(event.logprobs) for event in events if isinstance(event, TextDelta)] == [1, 2, 1]


def test_token_ids_come_with_the_next_text() -> None:
    reader = AnswerReader(DIALECT, WITH_TOOLS)
    events = read(reader, [TextDelta("", [1]), TextDelta("Hi", [2, 3]), TextDelta("", [4]), finish()])
    assert events[:-1] == [TextDelta("Hi", [1, 2, 3])]


@given(
    texts_of([*TAGS, CALL, "<tool_call>\n", "<function=ls>\n", "</tool_call>"]),
    st.booleans(),
    chunk_sizes,
    chunk_sizes,
)
def test_every_token_with_a_part_in_the_content_has_its_entry(
    text: str, in_thought: bool, sizes: list[int], batches: list[int]
) -> None:
    raws = [chunk.encode() for chunk in cut(text, sizes)]
    reader = AnswerReader(DIALECT, ReadOptions(TOOLS, in_thought))
    deltas = []
    while raws:
        batches = [*batches[1:], batches[0]]
        deltas.append(tokens(raws[: batches[0]]))
        raws = raws[batches[0] :]
    events = read(reader, [*deltas, finish("length", "max_new_tokens")])
    assert texts(events) == reader.content
    for event in events:
        if isinstance(event, TextDelta):
            assert bool(event.text)
    covered = "".join(entries(events))
    position = 0
    for character in reader.content:  # in order, all of it
        position = covered.index(character, position) + 1
