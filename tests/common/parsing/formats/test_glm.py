from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from common.parsing.formats.base import Call
from common.parsing.formats.glm import Glm
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import INDENTED, answer, calls_that_can_be_told, check_gives_back

GLM = Glm()
UNDECIDABLE = re.compile(
    r"</arg_value>\s*(<arg_key>|<arg_value>|</?tool_call>)|</tool_call>\s*<tool_call>|<arg_key>\s*\w+</arg_key>"
)


def argument(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


def call(name: str, *arguments: str) -> str:
    return f"<tool_call>{name}\n{''.join(arguments)}</tool_call>"


LS_SRV = call("ls", argument("path", "/srv"))
LS = ("ls", {"path": "/srv"})


@given(calls=calls_that_can_be_told(UNDECIDABLE), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(calls: list[Call], sizes: Sequence[int]) -> None:
    check_gives_back(GLM, calls, sizes)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (LS_SRV, [LS], ""),
        (call("now"), [("now", {})], ""),
        ("<tool_call>now</tool_call>", [("now", {})], ""),
        (f"ok\n{LS_SRV}\n{call('now')}", [LS, ("now", {})], "ok"),
        (LS_SRV.replace("\n", ""), [LS], ""),
        ("<tool_call>\nls\n<arg_key> path </arg_key><arg_value>\n/srv\n</arg_value></tool_call>", [LS], ""),
        (call("ls", argument("path", "/srv"), argument("depth", "2")), [("ls", {"path": "/srv", "depth": 2})], ""),
    ],
)
def test_calls(text: str, calls: list[Any], content: str) -> None:
    assert answer(GLM, text) == (calls, content)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (INDENTED, INDENTED),
        (f"\n{INDENTED}\n", INDENTED),
        ("", ""),
        ("\n\n", ""),
        ("\n", ""),
        ("a\n", "a\n"),
        ("</arg_value> is a closing tag", "</arg_value> is a closing tag"),
        ("</tool_call>\nis another", "</tool_call>\nis another"),
        ("<arg_key>path</arg_key>", "<arg_key>path</arg_key>"),  # is given already
        ("<arg_key>unknown</arg_key>", "<arg_key>unknown</arg_key>"),
        ("true", "true"),
    ],
)
def test_newlines_around_a_string_are_layout_where_there_are_two(written: str, value: str) -> None:
    assert answer(GLM, call("ls", argument("path", written))) == ([("ls", {"path": value})], "")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        # a key without a value: only that parameter is missing
        (call("ls", "<arg_key>depth</arg_key>\n", argument("path", "/srv")) + LS_SRV, [LS, LS], ""),
        (call("ls", argument("path", "/srv"), "<arg_key>depth</arg_key>"), [LS], ""),
        # without ends
        (LS_SRV.removesuffix("</tool_call>"), [LS], ""),
        (LS_SRV.removesuffix("</arg_value>\n</tool_call>"), [LS], ""),
        (LS_SRV.replace("</arg_value>", ""), [("ls", {"path": "/srv\n"})], ""),
        (LS_SRV.replace("</arg_key>", ""), [LS], ""),
        (
            call("ls", "<arg_key>path</arg_key><arg_value>/srv", argument("depth", "2")),
            [("ls", {"path": "/srv", "depth": 2})],
            "",
        ),
        # and with another call behind
        (LS_SRV.removesuffix("</tool_call>") + call("now"), [LS, ("now", {})], ""),
        (LS_SRV.replace("</arg_value>\n", "") + LS_SRV, [LS, LS], ""),
    ],
)
def test_forgotten_tags(text: str, calls: list[Any], content: str) -> None:
    assert answer(GLM, text) == (calls, content)


def test_a_call_with_a_value_that_has_no_key_is_content_and_the_others_stay() -> None:
    broken = call("ls", argument("path", "/srv"), "<arg_value>2</arg_value>\n")
    assert answer(GLM, f"{LS_SRV}\n{broken}\n{LS_SRV}") == ([LS, LS], broken)


@pytest.mark.parametrize(
    "text",
    [
        "Use the <tool_call> marker to call.",
        "Use <tool_call>ls to call it.",
        "Use <tool_call>ls",
        call("rm_all", argument("path", "/")),
        call("ls_all"),
        call(""),
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=ls>\n</function>\n</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(GLM, text) == ([], text)


@pytest.mark.parametrize("size", range(len("<tool_call>"), len(LS_SRV)))
def test_a_call_that_is_cut_off_is_content(size: int) -> None:
    calls, content = answer(GLM, f"ok {LS_SRV[:size]}", "cut")
    assert (calls, content.rstrip()) == ([], f"ok {LS_SRV[:size]}".rstrip())
