"""Messages of gpt-oss models become thoughts, calls and text for the user."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.answer import AnswerParser
from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tools
from common.parsing.harmony import HarmonyDialect
from common.parsing.pieces import CallBegin, CallEnd
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
)

HARMONY = HarmonyDialect()
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"path": "/srv"}'
TO_LS = " to=functions.ls<|channel|>commentary json<|message|>"
LS = Call("ls", '{"path": "/srv"}')
UNDECLARED = CALL.replace("ls", "rm_all")


def check(text: str, options: ReadOptions, thought: str, content: str, calls: list[Call]) -> None:
    check_answer(HARMONY, text, options, (thought, content, calls))


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"{ANALYSIS}plan<|end|>{FINAL}Hi<|return|>", "plan", "Hi", []),
        (f"{ANALYSIS}\nplan\n<|end|>\n{FINAL}Hi", "plan", "Hi", []),
        ("<|channel|>final<|message|>  Hi\n", "", "  Hi\n", []),
        ("<|message|>Hi", "", "Hi", []),
        (f"{ANALYSIS}plan", "plan", "", []),
        (f"{ANALYSIS}plan{FINAL}Hi", "plan", "Hi", []),
        (f"{ANALYSIS}plan<|channel|>final<|message|>Hi", "plan", "Hi", []),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}Hi", "ab", "Hi", []),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>", "", "I look.", [LS]),
        ("<|channel|>unknown<|message|>Hi", "", "Hi", []),
        (CALL, "", "", [LS]),
        (f"{CALL}<|call|>", "", "", [LS]),
        (f"{CALL} \n<|end|>{FINAL}Hi", "", "Hi", [LS]),
        (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", "", "", [LS, LS]),
        (f"{ANALYSIS}x<|end|><|start|>assistant{TO_LS}{LS.arguments}", "x", "", [LS]),
        (f"{TO_LS}{LS.arguments}", "", "", [LS]),
        (f'<|channel|>analysis to=functions.ls code<|message|>{LS.arguments}<|call|>', "", "", [LS]),
        (f'<|channel|>commentary to=ls<|message|>{LS.arguments}<|call|>', "", "", [LS]),
        ("<|channel|>commentary to=functions.get_goal<|message|><|call|>", "", "", [Call("get_goal", "{}")]),
        (f'{TO_LS}{{"path": "<|end|>"}}', "", "", [Call("ls", '{"path": "<|end|>"}')]),
        (f"{CALL}Done.", "", "Done.", [LS]),
    ],
)  # fmt: skip
def test_messages_are_told_apart(text: str, thought: str, content: str, calls: list[Call]) -> None:
    check(text, WITH_TOOLS, thought, content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        " Hi there\n",
        "the <|channel|> mark",
        "the <|channel|>token<|message|> mark",
        "<|start|>assistant<|channel|>fin",
        "<|start|>" * 5,
        f"{UNDECLARED}<|call|>",
        UNDECLARED,
        "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>no JSON<|call|>",
        "<|channel|>" + "x" * 2000 + "<|message|>",
        "",
    ],
)
def test_what_is_nothing_of_that_is_content(text: str) -> None:
    check(text, WITH_TOOLS, "", text, [])


def test_text_between_messages_is_content() -> None:
    check(f"{ANALYSIS}a<|end|>\nHi{FINAL}there", WITH_TOOLS, "a", "\nHithere", [])
    check(f"{ANALYSIS}a<|end|><|start|>assistant<|chan", WITH_TOOLS, "a", "<|start|>assistant<|chan", [])


def test_without_tools_a_call_is_content() -> None:
    check(f"{ANALYSIS}a<|end|><|start|>assistant{CALL}<|call|>", NO_TOOLS, "a", f"<|start|>assistant{CALL}<|call|>", [])


def test_a_call_that_breaks_off_is_content_after_all() -> None:
    text = CALL[:-6]
    for size in (1, 7, 100):
        pieces = read(HARMONY, text, sizes=(size,), ending="cut")
        assert (content_of(pieces), calls_of(pieces)) == (text, [])
        assert [piece for piece in pieces if isinstance(piece, CallBegin | CallEnd)] == [
            CallBegin("ls"),
            CallEnd(complete=False),
        ]


def test_arguments_are_given_out_while_they_come() -> None:
    parser = AnswerParser(HARMONY, WITH_TOOLS)
    assert parser.feed('<|channel|>commentary to=functions.ls<|message|>{"pa') != []
    assert parser.feed('th": "/s') != []
    assert parser.feed("rv") != []


@pytest.mark.parametrize(
    ("prompt", "thought", "content"),
    [
        ("<|start|>user<|message|>x<|end|><|start|>assistant", "", "planHi"),
        (f"<|start|>assistant{ANALYSIS}", "plan", "Hi"),
        (f"<|start|>assistant{ANALYSIS}I should ", "plan", "Hi"),
        (f"{FINAL}Once ", "", "planHi"),
        (f"<|start|>assistant{ANALYSIS}a<|end|>", "", "planHi"),
    ],
)
def test_a_prompt_may_begin_a_message(prompt: str, thought: str, content: str) -> None:
    in_thought = HARMONY.begins_in_thought(prompt)
    assert in_thought == bool(thought)
    check(f"plan<|end|>{FINAL}Hi", ReadOptions(TOOLS, in_thought), thought, content, [])


def test_what_ends_a_thought_is_read_as_such() -> None:
    check(f"plan{HARMONY.end_of_thought}Hi", ReadOptions(in_thought=True), "plan", "Hi", [])


anything = texts_of(
    [ANALYSIS, FINAL, CALL, UNDECLARED, " to=functions.ls", "<|start|>assistant", "<|message|>", "<|end|>", "<|call|>",
     "<|channel|>", '{"path": "', '"}']
)  # fmt: skip


@given(anything, st.sampled_from([Tools(), TOOLS]), st.booleans(), st.sampled_from(["complete", "cut"]), chunk_sizes)
def test_all_chunks_give_the_same(text: str, tools: Tools, in_thought: bool, ending: str, sizes: list[int]) -> None:
    options = ReadOptions(tools, in_thought)
    whole = read(HARMONY, text, options, sizes=(len(text) or 1,), ending=ending)  # type: ignore[arg-type]
    assert read(HARMONY, text, options, sizes=sizes, ending=ending) == whole  # type: ignore[arg-type]
    check_contents(text, whole)
    for call in calls_of(whole):
        assert isinstance(json.loads(call.arguments), dict)


@given(anything, st.booleans(), chunk_sizes)
def test_whether_it_thinks_depends_on_the_text_only(text: str, in_thought: bool, sizes: list[int]) -> None:
    options = ReadOptions(TOOLS, in_thought)
    parser = AnswerParser(HARMONY, options)
    fed = ""
    for chunk in cut(text, sizes):
        parser.feed(chunk)
        fed += chunk
        whole = AnswerParser(HARMONY, options)
        whole.feed(fed)
        assert parser.thinking == whole.thinking


@given(st.lists(st.sampled_from(["a", " ", "\n", "<", "|", "é", "<|start|>assistant", "<|chan"])).map("".join))
def test_without_a_message_all_is_content(text: str) -> None:
    assert content_of(read(HARMONY, text)) == text
