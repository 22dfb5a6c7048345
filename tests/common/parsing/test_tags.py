"""Thoughts, calls and text for the user are told apart in answers of models that mark them with tags."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.answer import AnswerParser
from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.formats.hermes import Hermes
from common.parsing.formats.qwen_xml import QwenXml
from common.parsing.grammar import GrammarWriter
from common.parsing.pieces import CallBegin, CallEnd, Content, NoCall, Piece, Reading, Thought
from common.parsing.scanner import Scanner
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import (
    NO_TOOLS,
    TOOLS,
    WITH_TOOLS,
    calls_of,
    check_answer,
    check_contents,
    chunk_sizes,
    content_of,
    cut,
    read,
    texts_of,
    thoughts_of,
)

TAGS = ("<think>", "</think>")
QWEN = TagDialect(TAGS, [QwenXml()])
EITHER = TagDialect(TAGS, [QwenXml(), Hermes()])
THOUGHTS = TagDialect(TAGS, ())
MISTRAL = TagDialect(("[THINK]", "[/THINK]"), ())
NOTHING = TagDialect(None, ())

CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
BARE = "<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>"
LS = Call("ls", '{"path": "/srv"}')
IN_THOUGHT = ReadOptions(TOOLS, in_thought=True)


def outcome(pieces: Sequence[Piece]) -> tuple[str, str, list[Call]]:
    return thoughts_of(pieces), content_of(pieces), calls_of(pieces)


# --- thoughts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nplan\n</think>\n\nHi", "plan", "Hi"),
        ("<think>plan</think>Hi", "plan", "Hi"),
        ("\n\n<think>plan</think>Hi", "plan", "Hi"),
        ("<think>\n\n</think>\n\nHi", "", "Hi"),
        ("<think>\n  plan\n\n  b</think>\n \n    indented\n", "  plan\n\n  b", "    indented\n"),
        ("<think>plan </think> Hi", "plan ", " Hi"),
        ("<think>plan", "plan", ""),
        ("<think>plan</thi", "plan</thi", ""),
        ("<think>plan</think>\n\n", "plan", ""),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>\na\n</think>\n\n<think>\nb\n</think>\n\nc", "a\n\nb", "c"),
        ("Hi\n\n<think>\nplan\n</think>\n\nthere", "plan", "Hi\n\nthere"),
        ("</think>Hi", "", "Hi"),
        ("\n</think>\n\nHi", "", "Hi"),
        ("<think>a</think></think>Hi", "a", "Hi"),
        ("Hi</think>there", "", "Hi</think>there"),
        ("Hi <thi", "", "Hi <thi"),
        ("<", "", "<"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_thoughts_are_told_apart(text: str, thought: str, content: str) -> None:
    check_answer(THOUGHTS, text, NO_TOOLS, (thought, content, []))
    check_answer(QWEN, text, WITH_TOOLS, (thought, content, []))


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("plan</think>Hi", "plan", "Hi"),
        ("the `</think>` token ends it, so...</think>Answer", "the `</think>` token ends it, so...", "Answer"),
        ("\"</think>\" or '</think>'</think>Hi", "\"</think>\" or '</think>'", "Hi"),
        ("the quotes are mine: `ls`</think>`Hi`", "the quotes are mine: `ls`</think>`Hi`", ""),
        ("<think>\nplan</think>Hi", "plan", "Hi"),  # as if the prompt had not opened it
        ("plan", "plan", ""),
        ("", "", ""),
        ("</think>Hi", "", "Hi"),
    ],
)
def test_a_prompt_may_open_a_thought(text: str, thought: str, content: str) -> None:
    check_answer(THOUGHTS, text, ReadOptions(in_thought=True), (thought, content, []))
    check_answer(QWEN, text, IN_THOUGHT, (thought, content, []))


@pytest.mark.parametrize(
    "text",
    [
        "the `<think>` tag",
        'the "<think>" tag',
        "the tag (<think>), too",
        "models write <think> first",
        "models begin with <think>.",
        "put it into <think></think>, please",
        "`<think>` and `</think>`",
    ],
)
def test_tags_that_are_talked_about_are_content(text: str) -> None:
    check_answer(QWEN, text, WITH_TOOLS, ("", text, []))


def test_without_tags_nothing_is_a_thought() -> None:
    text = "<think>a</think>b"
    check_answer(NOTHING, text, ReadOptions(in_thought=True), ("", text, []))


# --- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CALL, ""),
        (f"ok\n\n{CALL}\n", "ok"),
        (f"\n{CALL}\n\nDone.", "Done."),
        (f"ok {CALL}\n\nDone.", "ok Done."),
        (f"ok{CALL}\n\nDone.", "ok\n\nDone."),
        (f"{BARE}\n</tool_call>", ""),
        (CALL.removesuffix("</tool_call>"), ""),
    ],
)
def test_calls_are_told_apart(text: str, content: str) -> None:
    check_answer(QWEN, text, WITH_TOOLS, ("", content, [LS]))


def test_calls_may_follow_each_other() -> None:
    check_answer(QWEN, f"ok\n{CALL}\n{CALL}\n", WITH_TOOLS, ("", "ok", [LS, LS]))
    check_answer(QWEN, f"ok\n{CALL}\n\n{CALL} and\n{CALL}", WITH_TOOLS, ("", "ok\nand", [LS, LS, LS]))


@pytest.mark.parametrize(
    "text",
    [
        "Use the <tool_call> marker to call.",
        "Functions look like <function=get_x> here.",
        f"`{CALL}",
        CALL.replace("ls", "rm_all"),
        "<tool_call>\n" * 3,
        "ok \n <tool_",
        "ok \n <tool_call>",
        "<tool_call>\n<function=ls",
    ],
)
def test_what_is_no_call_of_a_declared_tool_is_content(text: str) -> None:
    check_answer(QWEN, text, WITH_TOOLS, ("", text, []))


@pytest.mark.parametrize("text", [CALL, f"ok\n{CALL}\nDone."])
def test_without_tools_a_call_is_content(text: str) -> None:
    check_answer(QWEN, text, NO_TOOLS, ("", text, []))


def test_a_call_that_breaks_off_is_content_after_all() -> None:
    text = "ok\n<tool_call>\n<function=ls>\n<parameter=path>\n/srv"
    for size in (1, 7, 100):
        pieces = read(QWEN, text, sizes=(size,), ending="cut")
        assert outcome(pieces) == ("", text, [])
        assert [piece for piece in pieces if isinstance(piece, CallBegin | CallEnd)] == [
            CallBegin("ls"),
            CallEnd(complete=False),
        ]


def test_calls_before_one_that_breaks_off_stay() -> None:
    broken = "<tool_call>\n<function=ls>\n<parameter=path>\n/s"
    pieces = read(QWEN, f"{CALL}\n{broken}", ending="cut")
    assert outcome(pieces) == ("", broken, [LS])


def test_arguments_are_given_out_while_they_come() -> None:
    parser = AnswerParser(QWEN, WITH_TOOLS)
    parser.feed("<tool_call>\n<function=ls>\n<parameter=path>\n")
    assert parser.feed("/srv/a") != []
    assert parser.feed("bc") != []


def test_content_is_given_out_as_early_as_possible() -> None:
    parser = AnswerParser(QWEN, WITH_TOOLS)
    assert parser.feed("Hello") == [Content("Hello", 0)]
    assert parser.feed(" the") == [Content(" the", 5)]
    assert parser.feed("re \n") == [Content("re", 9)]
    assert parser.feed("<to") == []
    assert parser.feed("p>") == [Content(" \n<top>", 11)]


def test_formats_with_the_same_start_are_tried_in_turn() -> None:
    json_call = '<tool_call>\n{"name": "ls", "arguments": {"path": "/srv"}}\n</tool_call>'
    check_answer(EITHER, f"{json_call}\n{CALL}", WITH_TOOLS, ("", "", [LS, LS]))


# --- calls in thoughts --------------------------------------------------------------------------------------------


def test_a_call_in_a_thought_is_one_if_no_content_follows() -> None:
    check_answer(QWEN, f"<think>maybe {CALL} no</think>Answer", WITH_TOOLS, (f"maybe {CALL} no", "Answer", []))
    check_answer(QWEN, f"<think>maybe\n{CALL}\n</think>\n", WITH_TOOLS, ("maybe", "", [LS]))
    check_answer(QWEN, f"<think>maybe\n{CALL}\n\nyes</think>", WITH_TOOLS, ("maybe\nyes", "", [LS]))
    check_answer(QWEN, f"<think>maybe\n{CALL}", WITH_TOOLS, ("maybe", "", [LS]))
    check_answer(QWEN, f"{CALL}\n", IN_THOUGHT, ("", "", [LS]))
    check_answer(QWEN, f"<think>a {CALL}</think>\n<think>b</think>Answer", WITH_TOOLS, (f"a {CALL}b", "Answer", []))


def test_a_call_in_a_thought_is_none_if_the_answer_makes_one() -> None:
    check_answer(QWEN, f"<think>maybe {CALL}</think>\n{CALL}", WITH_TOOLS, (f"maybe {CALL}", "", [LS]))


def test_calls_in_thoughts_can_be_left_alone() -> None:
    options = ReadOptions(TOOLS, calls_in_thoughts=False)
    check_answer(QWEN, f"<think>maybe {CALL}</think>\n{CALL}", options, (f"maybe {CALL}", "", [LS]))
    check_answer(QWEN, f"<think>maybe {CALL}", options, (f"maybe {CALL}", "", []))


def test_tags_in_the_arguments_of_a_call_are_part_of_them() -> None:
    call = CALL.replace("/srv", "<think>a</think>")
    path = Call("ls", json.dumps({"path": "<think>a</think>"}))
    check_answer(QWEN, call, WITH_TOOLS, ("", "", [path]))
    check_answer(QWEN, f"<think>so\n{call}", WITH_TOOLS, ("so", "", [path]))


def test_a_call_in_a_thought_that_breaks_off_does_not_swallow_the_answer() -> None:
    text = "maybe <tool_call>\n<function=ls>\n<parameter=path>\nno"
    for size in (1, 200):
        pieces = read(QWEN, f"<think>{text}</think>Answer", sizes=(size,), ending="cut")
        assert outcome(pieces) == (text, "Answer", [])


# --- defects ------------------------------------------------------------------------------------------------------


class Scripted(ToolFormat):
    """Reads the start, then does what it is told."""

    names = ("scripted",)
    starts: ClassVar = ("<x>",)
    trigger = "<x>"

    def __init__(self, *does: Piece | Exception) -> None:
        self.does = does

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(*self.starts)
        for deed in self.does:
            if isinstance(deed, Exception):
                raise deed
            yield deed

    def write(self, calls: Sequence[Call]) -> str:
        raise NotImplementedError

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        raise NotImplementedError


@pytest.mark.parametrize(
    "does",
    [
        [],
        [NoCall()],
        [ValueError("x")],
        [RecursionError()],
        [CallBegin("ls")],
        [CallBegin("ls"), NoCall()],
        [CallBegin("ls"), KeyError("x")],
    ],
)
@pytest.mark.parametrize("around", ["a <x> b", "<think><x></think>b"])
def test_a_defect_in_a_format_costs_no_text(does: list[Piece | Exception], around: str) -> None:
    pieces = read(TagDialect(TAGS, [Scripted(*does)]), around)
    assert "<x>" in thoughts_of(pieces) + content_of(pieces)
    assert calls_of(pieces) == []


class Greedy(Scripted):
    """Reads everything before it finds that there is no call."""

    characters = 0

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        text, _ = yield from scanner.until("#")
        self.characters += len(text)
        raise NoCall


@pytest.mark.parametrize("begin", ["", "<think>"])
def test_text_is_not_read_again_and_again(begin: str) -> None:
    text = "<x>" * 5000
    greedy = Greedy()
    pieces = read(TagDialect(TAGS, [greedy]), begin + text, sizes=(1000,))
    assert content_of(pieces) + thoughts_of(pieces) == text
    assert greedy.characters < 40 * len(text)  # 2,500 times would be all


# --- where an answer begins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "given", "expected"),
    [
        ("user\nhi\nassistant\n<think>\n", "", True),
        ("user\nhi\nassistant\n<think>", "", True),
        ("user\nhi\nassistant\n", "", False),
        ("user\nhi\nassistant\n<think>\n\n</think>\n\n", "", False),
        ("user\nwhat is <think>\nassistant\n", "", False),
        ("assistant\n<think>\n", "I should", True),
        ("assistant\n<think>\n", "so</think>Hi", False),
        ("assistant\n<think>\n", "the `</think>` tag", True),
        ("assistant\n", "<think>\nI should", True),
        ("assistant\n", "Hi, the `<think>` tag", False),
        ("assistant\n", "<think>a</think>", False),
    ],
)
def test_a_prompt_tells_whether_the_answer_begins_in_a_thought(prompt: str, given: str, expected: bool) -> None:
    assert THOUGHTS.begins_in_thought(prompt + given, len(given)) is expected
    assert not NOTHING.begins_in_thought(prompt + given, len(given))


def test_tags_may_be_any_strings() -> None:
    check_answer(MISTRAL, "[THINK]plan[/THINK]Hi [1]", NO_TOOLS, ("plan", "Hi [1]", []))
    assert MISTRAL.begins_in_thought("[INST]hi[/INST][THINK]")


@pytest.mark.parametrize("dialect", [QWEN, MISTRAL])
def test_what_ends_a_thought_is_read_as_such(dialect: TagDialect) -> None:
    end = dialect.end_of_thought
    assert end is not None
    check_answer(dialect, f"plan{end}Hi", IN_THOUGHT, ("plan", "Hi", []))
    assert NOTHING.end_of_thought is None


# --- any text -----------------------------------------------------------------------------------------------------

anything = texts_of(
    [*TAGS, CALL, BARE, "<tool_call>\n", "<function=ls>\n", "<parameter=path>\n", "/srv", "\n</parameter>\n",
     "</function>\n", "</tool_call>", '{"name": "ls", "arguments": {"path": "', '"}}\n']
)  # fmt: skip
some_options = st.builds(ReadOptions, st.sampled_from([Tools(), TOOLS]), st.booleans(), st.booleans())
endings = st.sampled_from(["complete", "cut"])


@given(anything, some_options, st.sampled_from([QWEN, EITHER, THOUGHTS]), endings, chunk_sizes)
def test_all_chunks_give_the_same(
    text: str, options: ReadOptions, dialect: TagDialect, ending: str, sizes: list[int]
) -> None:
    whole = read(dialect, text, options, sizes=(len(text) or 1,), ending=ending)  # type: ignore[arg-type]
    assert read(dialect, text, options, sizes=sizes, ending=ending) == whole  # type: ignore[arg-type]
    check_contents(text, whole)
    for call in calls_of(whole):
        assert isinstance(json.loads(call.arguments), dict)


@given(anything, some_options, chunk_sizes)
def test_whether_it_thinks_depends_on_the_text_only(text: str, options: ReadOptions, sizes: list[int]) -> None:
    pieces = AnswerParser(EITHER, options)
    fed = ""
    for chunk in cut(text, sizes):
        pieces.feed(chunk)
        fed += chunk
        whole = AnswerParser(EITHER, options)
        whole.feed(fed)
        assert pieces.thinking == whole.thinking


@given(anything, chunk_sizes)
def test_without_marks_all_is_content(text: str, sizes: list[int]) -> None:
    expected = [Content(text, 0)] if text else []
    assert read(NOTHING, text, sizes=sizes) == expected
    assert read(TagDialect(None, [QwenXml()]), text, NO_TOOLS, sizes=sizes) == expected


@given(anything, some_options, endings)
def test_nothing_is_lost_but_tags_and_blanks(text: str, options: ReadOptions, ending: str) -> None:
    pieces = read(EITHER, text, options, ending=ending)  # type: ignore[arg-type]
    if calls_of(pieces):
        return  # what is in them is up to their formats
    lost = Counter("".join(text.split()))
    lost.subtract("".join(thoughts_of(pieces).split()) + "".join(content_of(pieces).split()))
    closing = lost["/"]
    opening = lost["<"] - closing
    expected = Counter(TAGS[0] * opening + TAGS[1] * closing)
    assert min(opening, closing) >= 0
    assert +lost == expected
    assert not -lost


def test_thoughts_come_before_what_follows_them() -> None:
    kinds = [type(piece) for piece in read(QWEN, f"<think>a {CALL} b</think>c")]
    assert kinds == [Thought, Content]
