"""Messages of Muse Glimmer become thoughts, calls and text for the user."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tools
from common.parsing.glimmer import GlimmerDialect
from tests.common.parsing.answers import (
    NO_TOOLS,
    TOOLS,
    WITH_TOOLS,
    calls_of,
    check_answer,
    check_contents,
    chunk_sizes,
    content_of,
    read,
    texts_of,
)

GLIMMER = GlimmerDialect()
SELF = " to=self<|message|>"
USER = "<|start|>assistant to=user<|message|>"
TO_LS = "<|start|>assistant to=ls<|message|>"
INVOKE = '<atem:invoke name="ls">\n<atem:parameter name="path">/srv</atem:parameter>\n</atem:invoke>\n'
CALLS = f"<atem:function_calls>\n{INVOKE}</atem:function_calls>"
LS = Call("ls", '{"path": "/srv"}')


def check(text: str, options: ReadOptions, thought: str, content: str, calls: list[Call]) -> None:
    check_answer(GLIMMER, text, options, (thought, content, calls))


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"{SELF}plan<|eom|>{USER}Hi<|eot|>", "plan", "Hi", []),
        (" to=user<|message|>Hi", "", "Hi", []),
        ("<|message|>Hi", "", "Hi", []),
        (f"{SELF}plan", "plan", "", []),
        (f"{SELF}plan{USER}Hi", "plan", "Hi", []),
        (f"{TO_LS}{CALLS}<|eot|>", "", "", [LS]),
        (f" to=ls<|message|>{CALLS}", "", "", [LS]),
        (f"{SELF}a<|eom|>{TO_LS}{CALLS}<|eom|>{TO_LS}{CALLS}<|eot|>", "a", "", [LS, LS]),
        (f"{TO_LS}<atem:function_calls>{INVOKE}{INVOKE}</atem:function_calls>", "", "", [LS, LS]),
        (f"{TO_LS}{INVOKE}<|eot|>", "", "", [LS]),
        (TO_LS + CALLS.replace("</atem:invoke>\n", ""), "", "", [LS]),
        (TO_LS + CALLS.replace("</atem:parameter>\n", ""), "", "", [LS]),
        (f"{TO_LS}{CALLS}\nDone.<|eot|>", "", "Done.", [LS]),
        (f'{TO_LS}<atem:invoke name="get_goal">\n</atem:invoke>', "", "", [Call("get_goal", "{}")]),
    ],
)
def test_messages_are_told_apart(text: str, thought: str, content: str, calls: list[Call]) -> None:
    check(text, WITH_TOOLS, thought, content, calls)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ("path", "\n  a\n", "\n  a\n"),
        ("path", "true", "true"),
        ("path", "a</atem:parameter>b", "a</atem:parameter>b"),
        ("depth", "3", 3),
        ("depth", " 3\n", 3),
        ("other", '{"a": 1}', {"a": 1}),
        ("other", " a ", " a "),
    ],
)
def test_values_are_of_the_declared_type_and_strings_verbatim(schema: str, written: str, value: object) -> None:
    call = CALLS.replace("path", schema).replace("/srv", written)
    (found,) = calls_of(read(GLIMMER, f"{TO_LS}{call}"))
    assert json.loads(found.arguments) == {schema: value}


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        "the <|start|> mark",
        "<|start|>assistant to=us",
        "<|start|>assistant to=rm_all<|message|>x<|eom|>",
        TO_LS + CALLS.replace("ls", "rm_all"),
        f"{TO_LS}no call<|eot|>",
    ],
)
def test_what_is_nothing_of_that_is_content(text: str) -> None:
    check(text, WITH_TOOLS, "", text, [])


def test_without_tools_a_call_is_content() -> None:
    check(f"{SELF}a<|eom|>{TO_LS}{CALLS}<|eot|>", NO_TOOLS, "a", f"{TO_LS}{CALLS}<|eot|>", [])


def test_a_call_that_breaks_off_is_content_after_all() -> None:
    broken = '<atem:invoke name="ls">\n<atem:parameter name="path">/s'
    pieces = read(GLIMMER, f"{TO_LS}<atem:function_calls>{INVOKE}{broken}", ending="cut")
    assert (content_of(pieces).strip(), calls_of(pieces)) == (broken, [LS])
    pieces = read(GLIMMER, f"{TO_LS}{broken}", ending="cut")
    assert (content_of(pieces), calls_of(pieces)) == (f"{TO_LS}{broken}", [])


@pytest.mark.parametrize(
    ("prompt", "in_thought"),
    [
        ("<|start|>user<|message|>x<|eom|><|start|>assistant", False),
        ("<|start|>assistant to=self<|message|>", True),
        ("<|start|>assistant to=self<|message|>I should", True),
        (f"{USER}Once", False),
    ],
)
def test_a_prompt_may_begin_a_message(prompt: str, in_thought: bool) -> None:
    assert GLIMMER.begins_in_thought(prompt) is in_thought


def test_what_ends_a_thought_is_read_as_such() -> None:
    check(f"plan{GLIMMER.end_of_thought}Hi", ReadOptions(in_thought=True), "plan", "Hi", [])


@given(
    texts_of([SELF, USER, TO_LS, CALLS, INVOKE, "<|start|>assistant", "<|message|>", "<|eom|>", '<atem:invoke name="']),
    st.sampled_from([Tools(), TOOLS]),
    st.booleans(),
    st.sampled_from(["complete", "cut"]),
    chunk_sizes,
)
def test_all_chunks_give_the_same(text: str, tools: Tools, in_thought: bool, ending: str, sizes: list[int]) -> None:
    options = ReadOptions(tools, in_thought)
    whole = read(GLIMMER, text, options, sizes=(len(text) or 1,), ending=ending)  # type: ignore[arg-type]
    assert read(GLIMMER, text, options, sizes=sizes, ending=ending) == whole  # type: ignore[arg-type]
    check_contents(text, whole)
    for call in calls_of(whole):
        assert isinstance(json.loads(call.arguments), dict)
