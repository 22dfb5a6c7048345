from __future__ import annotations

from typing import Any

import pytest

from common.conversations import Message
from common.prefixes import (
    VOLATILE_LINES,
    Answer,
    Outline,
    PrefixBreak,
    PrefixHistory,
    Returned,
    Turn,
    WrittenPrompt,
    common_length,
    without_volatile_line,
)
from common.templating import ChatTemplate, RenderedPrompt

KEEPING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = KEEPING.replace("m.content", "m.content | trim")
REWRITING = KEEPING.replace("{{ m.content }}", "{{ m.content }}{{ '[last]' if loop.last }}")
DATED = "{{ today }}" + KEEPING
SHOUTING = KEEPING.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}")


def said(role: str, content: str, thought: str | None = None) -> Message:
    message = {"role": role, "content": content}
    return message if thought is None else {**message, "reasoning_content": thought}


def calling(call_id: str, arguments: object, content: str = "") -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "ls", "arguments": arguments}}
    return {**said("assistant", content), "tool_calls": [call]}


def turn_of(prompt: str, messages: list[Message], inputs: dict[str, Any] | None = None) -> Turn:
    return Turn.of(WrittenPrompt.by_template(RenderedPrompt(prompt, [], [])), messages, inputs or {})


def latest(history: PrefixHistory, messages: list[Message]) -> Returned | None:
    return history.latest(messages, Outline.of(messages))


def check(history: PrefixHistory, prompt: str, messages: list[Message]) -> PrefixBreak | None:
    returned = latest(history, messages)
    return None if returned is None else history.check(turn_of(prompt, messages), returned)


class Chat:
    """A conversation with a model, one turn after the other."""

    def __init__(self, source: str = KEEPING, history: PrefixHistory | None = None) -> None:
        self.template = ChatTemplate("t", source)
        self.history = history or PrefixHistory()

    def turn(
        self, messages: list[Message], answer: str, inputs: dict[str, Any] | None = None, **variables: str
    ) -> PrefixBreak | None:
        turn = turn_of(self.template.render(messages, variables).text, messages, inputs)
        returned = latest(self.history, messages)
        self.history.remember(turn, Answer(answer, [], self.returned(answer)))
        return None if returned is None else self.history.check(turn, returned)

    def returned(self, answer: str) -> Message:
        thought, tag, content = answer.rpartition("</think>")
        return said("assistant", content, thought if tag else None)


ONE = [said("system", "Be kind."), said("user", "one")]
TWO = [*ONE, said("assistant", "first "), said("user", "two")]
THREE = [*TWO, said("assistant", "second"), said("user", "three")]


def test_a_conversation_that_goes_on_is_silent() -> None:
    chat = Chat()
    assert chat.turn(ONE, "first ") is None
    assert chat.turn(TWO, "second") is None
    assert chat.turn(THREE, "third") is None
    # Another answer to the same messages is a turn of its own.
    assert chat.turn(TWO, "other") is None
    assert chat.turn([*TWO, said("assistant", "other"), said("user", "x")], "y") is None


def test_where_and_how_much() -> None:
    chat = Chat(TRIMMING)
    chat.turn([said("user", "é")], "first ")
    broken = chat.turn([said("user", "é"), said("assistant", "first "), said("user", "x")], "y")
    assert broken is not None
    assert broken.byte == len("<user>é</><assistant>first".encode())
    assert broken.lost == 1
    assert (broken.before, broken.after) == (" ", "</><user>x</><assistant>")
    assert broken.describe(quote=True).endswith("(' ' became '</><user>x</><assistant>')")
    assert "became" not in broken.describe(quote=False)


@pytest.mark.parametrize(
    ("source", "answer", "messages", "reason"),
    [
        (TRIMMING, "first ", TWO, "trims the answer"),
        (KEEPING, "why</think>first", [*ONE, said("assistant", "first"), said("user", "x")], "thoughts out"),
        (KEEPING, "why</think>first", [*ONE, said("assistant", "first", "what"), said("user", "x")], "the thought"),
        (REWRITING, "first ", TWO, "earlier messages in another way"),
        (SHOUTING, "first ", TWO, "the answer in another way"),
        (KEEPING, "first ", [*ONE, said("assistant", "first"), said("user", "x")], "blanks around the answer"),
        (KEEPING, "first ", [said("system", "Be rude."), *TWO[1:]], "the system prompt was edited"),
        (KEEPING, "first ", TWO[1:], "a message was removed at position 0"),
        (KEEPING, "first ", [said("system", "New."), *TWO], "a message was inserted at position 0"),
    ],
)
def test_why(source: str, answer: str, messages: list[Message], reason: str) -> None:
    chat = Chat(source)
    chat.turn(ONE, answer)
    broken = chat.turn(messages, "y")
    assert broken is not None
    assert reason in broken.reason


@pytest.mark.parametrize(
    ("position", "replacement", "reason"),
    [
        (1, [said("user", "uno")], "message 1 was edited"),
        (2, [], "a message was removed at position 2"),
        (1, [said("user", "one"), said("user", "and"), said("user", "half")], "2 messages were inserted at position 2"),
        (0, [said("user", "Be kind.")], "message 0 was edited"),
    ],
)
def test_what_the_client_changed_before_the_answer(position: int, replacement: list[Message], reason: str) -> None:
    chat = Chat()
    chat.turn(TWO, "second")
    broken = chat.turn([*THREE[:position], *replacement, *THREE[position + 1 :]], "y")
    assert broken is not None
    assert broken.reason == reason


def test_several_changes() -> None:
    chat = Chat()
    chat.turn(TWO, "second", {"tools": [1], "enable_thinking": True, "verbosity": None})
    changed = [said("system", "x"), said("user", "y"), *THREE[2:]]
    broken = chat.turn(changed, "y", {"tools": [2], "reasoning_effort": "low"})
    assert broken is not None
    assert broken.reason == (
        "several messages from number 0 on were edited and enable_thinking changed and reasoning_effort changed "
        "and tools changed"
    )


def test_tools_that_change_nothing_are_silent() -> None:
    chat = Chat()
    chat.turn(ONE, "first ", {"tools": [1]})
    assert chat.turn(TWO, "second", {"tools": [2]}) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2025-11-24", "2025-11-25"),
        ("Today is Monday, 24 November", "Today is Tuesday, 25 November"),
        ("Nov 9, 2025", "Nov 10, 2025"),
        ("at 10:59", "at 11:00"),
        ("1.12.2025", "2.12.2025"),
    ],
)
def test_dates_and_times(before: str, after: str) -> None:
    by_template, by_client = Chat(DATED), Chat()
    by_template.turn(ONE, "first ", today=before)
    broken = by_template.turn(TWO, "second", today=after)
    assert broken is not None
    assert broken.reason == "a date or time in the prompt is another"
    by_client.turn([said("system", f"Be kind. {before}"), *ONE[1:]], "first ")
    broken = by_client.turn([said("system", f"Be kind. {after}"), *TWO[1:]], "second")
    assert broken is not None
    assert broken.reason == "a date or time in the prompt is another and the system prompt was edited"


def test_only_the_latest_turns_are_kept() -> None:
    chat = Chat(TRIMMING, PrefixHistory(max_turns=2))
    for number in range(3):
        chat.turn([said("user", str(number))], "answer ")
    follow = [[said("user", str(number)), said("assistant", "answer "), said("user", "x")] for number in range(3)]
    assert [latest(chat.history, messages) is not None for messages in follow] == [False, True, True]
    chat = Chat(TRIMMING, PrefixHistory(max_characters=60))
    for number in range(3):
        chat.turn([said("user", str(number))], "answer ")
        chat.turn([said("user", str(number))], "answer ")  # takes the place of the first
    assert [latest(chat.history, messages) is not None for messages in follow] == [False, True, True]


def test_the_answer_as_the_client_got_it() -> None:
    history = PrefixHistory()
    messages = [said("user", "x")]
    history.remember(turn_of("P", messages), Answer(" tail", [], said("assistant", "begun tail")))
    assert check(history, "P tail|", [*messages, said("assistant", "begun tail"), said("user", "y")]) is None
    assert check(history, "Q", [*messages, said("assistant", "begun tail")]) is not None


def test_an_answer_with_calls_is_known_by_their_ids() -> None:
    history = PrefixHistory()
    question = said("user", "x")
    history.remember(turn_of("P", [question]), Answer("raw", [], calling("c1", '{"a": 1}', "So:")))
    returned = latest(history, [said("user", "edited"), calling("c1", {"a": 2})])
    assert returned is not None
    assert (returned.has_its_content, returned.has_its_calls) == (False, False)
    returned = latest(history, [question, calling("other", {"a": 1}, " So:")])
    assert returned is not None
    assert returned.is_unchanged
    assert latest(history, [said("user", "edited"), calling("c2", {"a": 1}, "So:")]) is None


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ('{"a": 1.0, "b": "é"}', True),
        ('{"b":"\\u00e9","a":1}', True),
        ({"a": 1, "b": "é"}, True),
        ('{"a": 1}', False),
        ('{"a": 1', False),
        ([], False),
    ],
)
def test_arguments_are_the_same_whatever_their_spelling(arguments: object, same: bool) -> None:
    history = PrefixHistory()
    history.remember(turn_of("P", []), Answer("raw", [], calling("c1", '{"a":1,"b":"é"}')))
    returned = latest(history, [calling("c1", arguments)])
    assert returned is not None
    assert returned.has_its_calls is same


def test_a_call_that_was_forgotten_is_not_known() -> None:
    history = PrefixHistory(max_turns=1)
    history.remember(turn_of("P", []), Answer("raw", [], calling("c1", "{}")))
    history.remember(turn_of("Q", []), Answer("raw", [], calling("c2", '{"a": 1}')))
    assert latest(history, [calling("c1", "{}")]) is None
    assert latest(history, [calling("c2", "{}")]) is not None


@pytest.mark.parametrize(
    ("first", "second", "length"), [("", "", 0), ("ab", "abc", 2), ("abd", "abc", 2), ("x", "y", 0)]
)
def test_common_length(first: str, second: str, length: int) -> None:
    assert common_length(first, second) == common_length(second, first) == length


# --- volatile lines -------------------------------------------------------------------------------------------------

HEADER = "x-anthropic-billing-header: cc_version=9.9.9; cch=aa111;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{HEADER}\nBe kind.\nAlways.", "Be kind.\nAlways."),
        (f"{HEADER}\r\n\r\nBe kind.", "Be kind."),
        (f"\n {HEADER.upper()}\nBe kind.", "Be kind."),
        (HEADER, ""),
        ("", ""),
        (" Be kind.\n", " Be kind.\n"),
        (f"Be kind.\n{HEADER}", f"Be kind.\n{HEADER}"),
        (f"Mind: {HEADER}\nx", f"Mind: {HEADER}\nx"),
    ],
)
def test_a_volatile_first_line_is_left_out(text: str, left: str) -> None:
    assert without_volatile_line(text) == left


def test_the_table_of_volatile_lines() -> None:
    assert [line.agent for line in VOLATILE_LINES] == ["Claude Code"]


def test_the_next_turn_of_a_message_that_was_continued() -> None:
    history = PrefixHistory()
    history.remember(turn_of("<assistant>We", []), Answer("ll", [], said("assistant", "Well")))
    assert check(history, "<assistant>Well</>", [said("assistant", "Well")]) is None
    assert check(history, "<assistant>well</>", [said("assistant", "Well")]) is not None
