from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from common.parsing.answer import AnswerParser
from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tool, Tools
from common.parsing.formats.qwen_xml import QwenXml
from common.parsing.pieces import CallArguments, CallBegin, CallEnd
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import (
    INDENTED,
    TOOLS,
    answer,
    calls_that_can_be_told,
    check_gives_back,
    read_with,
)

QWEN = QwenXml()
UNDECIDABLE = re.compile(
    r"</parameter>\s*(<parameter=|</function>|</?tool_call>|<function=)|</function>\s*</tool_call>\s*<tool_call>"
    r"|<parameter=\s*\w+>\n"
)


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def call(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


LS_SRV = call("ls", parameter("path", "/srv"))
LS = ("ls", {"path": "/srv"})


@given(calls=calls_that_can_be_told(UNDECIDABLE), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(calls: list[Call], sizes: Sequence[int]) -> None:
    check_gives_back(QWEN, calls, sizes)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (LS_SRV, [LS], ""),
        (call("now"), [("now", {})], ""),
        (f"ok\n{LS_SRV}\ndone", [LS], "ok\ndone"),
        (f"{LS_SRV}\n{call('now')}", [LS, ("now", {})], ""),
        # several functions in a wrapper
        ("<tool_call><function=now></function>\n<function=ls></function></tool_call>", [("now", {}), ("ls", {})], ""),
        # nothing but the marks
        ("<tool_call><function=ls><parameter=path>/srv</parameter></function></tool_call>", [LS], ""),
        ("<tool_call><function='ls' strict><parameter=\"path\">/srv</parameter></function></tool_call>", [LS], ""),
    ],
)
def test_calls(text: str, calls: list[Any], content: str) -> None:
    assert answer(QWEN, text) == (calls, content)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (f"\n{INDENTED}\n", INDENTED),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("\n\n\n\n", "\n\n"),
        ("  a  ", "  a  "),
        ("\n</parameter> is a closing tag\n", "</parameter> is a closing tag"),
        ("\n</parameter>\n", "</parameter>"),
        ("\n</parameter>\n</tool>\n", "</parameter>\n</tool>"),
        ("\n<function=ls>\n</function>\n</tool_call>\n", "<function=ls>\n</function>\n</tool_call>"),
        ("\n<parameter=path>\n", "<parameter=path>"),  # is given already
        ("\nsee <parameter=depth> there\n", "see <parameter=depth> there"),
        ("\n1.10\n", "1.10"),
        ("\nnull\n", "null"),
    ],
)
def test_a_string_loses_one_newline_on_each_side(written: str, value: str) -> None:
    text = f"<tool_call>\n<function=ls>\n<parameter=path>{written}</parameter>\n</function>\n</tool_call>"
    assert answer(QWEN, text) == ([("ls", {"path": value})], "")


def test_a_string_is_passed_on_as_it_comes() -> None:
    parser = AnswerParser(TagDialect(None, [QWEN]), ReadOptions(TOOLS))
    assert parser.feed("<tool_call>\n<function=edit>") == [CallBegin("edit")]
    assert parser.feed('\n<parameter=old_string>\n\n  a"') == [CallArguments('{"old_string": "\\n  a\\"')]
    assert parser.feed("b\n") == [CallArguments("b")]
    assert parser.feed("</param") == []
    assert parser.feed("s") == [CallArguments("\\n</params")]
    assert parser.feed("\n</parameter>\n<") == []
    assert parser.feed("parameter=note>\nnu") == [CallArguments('", "note": ')]
    assert parser.feed("mb") == [CallArguments('"numb')]
    assert parser.feed("\n</parameter>\n<parameter=count>\n1") == [CallArguments('", "count": ')]
    assert parser.feed("2\n</parameter>\n</function>") == [CallArguments("12}"), CallEnd()]
    assert parser.feed("\n</tool_call>") == parser.end("complete") == []


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([("count", "5.0"), ("ratio", "1.10"), ("all", "True")], '{"count": 5, "ratio": 1.10, "all": true}'),
        ([("lines", "['a', None]"), ("options", '{"a":  1}')], '{"lines": ["a", null], "options": {"a":  1}}'),
        ([("note", "null"), ("other", "NaN"), ("unknown", "[1]")], '{"note": null, "other": "NaN", "unknown": [1]}'),
        # Twice: for readers of JSON, the last one counts.
        ([("path", "a"), ("path", "b")], '{"path": "a", "path": "b"}'),
    ],
)
def test_values_have_the_declared_types(parameters: list[tuple[str, str]], arguments: str) -> None:
    pieces = read_with(QWEN, call("edit", *(parameter(*each) for each in parameters)))
    assert pieces == [CallBegin("edit"), CallArguments(arguments), CallEnd()]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        # without the beginning of the wrapper
        (f"<function=ls>\n{parameter('path', '/srv')}</function>\n</tool_call>", [LS], ""),
        (f"I look.\n<function=ls>\n{parameter('path', '/srv')}</function>\n</tool_call>", [LS], "I look."),
        (f"<function=ls>{parameter('path', '/srv')}</function>\n<function=now></function>", [LS, ("now", {})], ""),
        # without ends
        (f"<tool_call>\n<function=ls>\n{parameter('path', '/srv')}</tool_call>", [LS], ""),
        (f"<tool_call>\n<function=ls>\n{parameter('path', '/srv')}", [LS], ""),
        (f"<tool_call>\n<function=ls>\n{parameter('path', '/srv')}</function>", [LS], ""),
        ("<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>", [LS], ""),
        ("<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</function>\n</tool_call>", [LS], ""),
        ("<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</function>", [LS], ""),
        ("<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n", [LS], ""),
        ("<tool_call>\n<function=now>\n</tool_call>", [("now", {})], ""),
        (
            f"<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n{parameter('depth', '2')}</function>\n</tool_call>",
            [("ls", {"path": "/srv", "depth": 2})],
            "",
        ),
        # without ends, and with another call behind
        (f"<tool_call>\n<function=ls>\n{parameter('path', '/srv')}{call('now')}", [LS, ("now", {})], ""),
        (f"<tool_call>\n<function=ls>\n{parameter('path', '/srv')}<function=now>\n</function>", [LS, ("now", {})], ""),
        (f"<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</function></tool_call>\n{LS_SRV}", [LS, LS], ""),
        ("<tool_call>\n<function=now>\n</function>\n\nDone.", [("now", {})], "Done."),
    ],
)
def test_forgotten_tags(text: str, calls: list[Any], content: str) -> None:
    assert answer(QWEN, text) == (calls, content)


@pytest.mark.parametrize(
    "text",
    [
        "Use the <tool_call> marker to call.",
        "Use `<function=now>` to know the time.",
        "Use <function=now>\n</function> to know the time.",
        "<function=now> tells the time.\n</function>",
        "<function=now>",
        "<function=get_x>\n</function>",
        call("rm_all", parameter("path", "/")),
        call("ls_all"),
        "<tool_call>\n<function=ls",
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
        "<tool_call>now\n</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(QWEN, text) == ([], text)


def test_no_tools_no_calls() -> None:
    assert answer(QWEN, LS_SRV, tools=Tools()) == ([], LS_SRV)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n<function=edit>\n{parameter('path', 'a')}<parameter=old_string>\nlong te",
        f"<tool_call>\n<function=edit>\n{parameter('path', 'a')}",
        "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</function>\n</tool_call>",
        "<tool_call>\n<function=ls>\n<parameter=pa",
        "<tool_call>\n<function=now>\n",
        "<tool_call>\n<function=no",
    ],
)
def test_a_call_that_is_cut_off_is_content(text: str) -> None:
    assert answer(QWEN, f"ok {text}", "cut") == ([], f"ok {text}")


def test_a_call_that_is_complete_may_be_cut() -> None:
    assert answer(QWEN, f"{LS_SRV}\n{LS_SRV[:30]}", "cut") == ([LS], LS_SRV[:30])
    assert answer(QWEN, LS_SRV.removesuffix("\n</tool_call>"), "cut") == ([LS], "")


def test_what_is_none_of_a_call_makes_it_content() -> None:
    text = f"<tool_call>\n<function=ls>\nreally?\n{parameter('path', '/srv')}</function>\n</tool_call>"
    assert answer(QWEN, text) == ([], text)


def test_properties_that_are_none() -> None:
    tools = Tools([Tool("ls", {"properties": None}), Tool("now", {"properties": {"path": 1}})])
    assert answer(QWEN, LS_SRV, tools=tools) == ([LS], "")
    assert answer(QWEN, LS_SRV.replace("=ls>", "=now>"), tools=tools) == ([("now", {"path": "/srv"})], "")
