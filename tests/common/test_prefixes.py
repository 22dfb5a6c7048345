from __future__ import annotations

from typing import Any

import pytest

from common.conversations import Message
from common.prefixes import VOLATILE_LINES, PrefixBreak, PrefixHistory, Turn, without_volatile_line
from common.templating import ChatTemplate

KEEPING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = KEEPING.replace("m.content", "m.content | trim")
THINKING = KEEPING.replace("m.content", "m.content.split('</think>')[-1]")
REWRITING = KEEPING.replace("{{ m.content }}", "{{ m.content }}{{ '[last]' if loop.last }}")
DATED = "{{ today }}" + KEEPING
SHOUTING = KEEPING.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}")


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Chat:
    """A conversation with a model, one turn after the other."""

    def __init__(self, source: str = KEEPING, history: PrefixHistory | None = None) -> None:
        self.template = ChatTemplate("t", source)
        self.history = history or PrefixHistory()

    def turn(
        self, messages: list[Message], answer: str, inputs: dict[str, Any] | None = None, **variables: str
    ) -> PrefixBreak | None:
        turn = Turn.of(self.template.render(messages, variables).text, messages, inputs or {})
        broken = self.history.check(turn)
        self.history.remember(turn, answer)
        return broken


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
        (THINKING, "why</think>first", [*ONE, said("assistant", "why</think>first"), said("user", "x")], "thoughts"),
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
    assert [chat.history.check(Turn.of("", messages, {})) is not None for messages in follow] == [False, True, True]
    chat = Chat(TRIMMING, PrefixHistory(max_characters=60))
    for number in range(3):
        chat.turn([said("user", str(number))], "answer ")
        chat.turn([said("user", str(number))], "answer ")  # takes the place of the first
    assert [chat.history.check(Turn.of("", messages, {})) is not None for messages in follow] == [False, True, True]


def test_the_answer_as_the_client_got_it() -> None:
    history = PrefixHistory()
    messages = [said("user", "x")]
    history.remember(Turn.of("P", messages, {}), " tail", "begun tail")
    turn = Turn.of("P tail|", [*messages, said("assistant", "begun tail"), said("user", "y")], {})
    assert history.check(turn) is None
    broken = history.check(Turn.of("Q", [*messages, said("assistant", "begun tail")], {}))
    assert broken is not None


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
    history.remember(Turn.of("<assistant>We", [], {}), "ll", "Well")
    assert history.check(Turn.of("<assistant>Well</>", [said("assistant", "Well")], {})) is None
    assert history.check(Turn.of("<assistant>well</>", [said("assistant", "Well")], {})) is not None
