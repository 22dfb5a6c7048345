from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from common.parsing.formats.base import Call
from common.parsing.formats.minimax import MiniMax
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import INDENTED, answer, calls_that_can_be_told, check_gives_back

MINIMAX = MiniMax()
UNDECIDABLE = re.compile(
    r"</parameter>\s*(<parameter |</invoke>|<invoke |</?minimax:tool_call>)"
    r"|</invoke>\s*</minimax:tool_call>\s*(<minimax:tool_call>|<invoke )"
    r'|<parameter \s*name="'
)


def parameter(name: str, value: str) -> str:
    return f'<parameter name="{name}">{value}</parameter>\n'


def call(name: str, *parameters: str) -> str:
    return f'<invoke name="{name}">\n{"".join(parameters)}</invoke>\n'


def block(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


LS_SRV = call("ls", parameter("path", "/srv"))
LS = ("ls", {"path": "/srv"})


@given(calls=calls_that_can_be_told(UNDECIDABLE), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(calls: list[Call], sizes: Sequence[int]) -> None:
    check_gives_back(MINIMAX, calls, sizes)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (block(LS_SRV), [LS], ""),
        (block(LS_SRV, call("now")), [LS, ("now", {})], ""),
        (f"ok\n\n{block(LS_SRV)}\n{block(call('now'))}", [LS, ("now", {})], "ok"),
        (block(LS_SRV).replace("\n", ""), [LS], ""),
        (block('<invoke id="1" name="ls" x=y>\n<parameter type=\'a\' name="path">/srv</parameter></invoke>'), [LS], ""),
        (block("<invoke name='ls'>\n<parameter name=path>/srv</parameter></invoke>"), [LS], ""),
        (block(call("ls", parameter("depth", "2"))), [("ls", {"depth": 2})], ""),
        # without outer tags
        (LS_SRV, [LS], ""),
        (f"ok\n{LS_SRV}</minimax:tool_call>", [LS], "ok"),
        # without ends
        (block(LS_SRV).removesuffix("</minimax:tool_call>"), [LS], ""),
        (block(LS_SRV.replace("</invoke>", "")), [LS], ""),
        (block(LS_SRV.replace("</invoke>", ""), call("now")), [LS, ("now", {})], ""),
        (block(LS_SRV.replace("</parameter>\n", "")), [LS], ""),
        (
            block(call("ls", '<parameter name="path">/srv', parameter("depth", "2"))),
            [("ls", {"path": "/srv", "depth": 2})],
            "",
        ),
    ],
)
def test_calls(text: str, calls: list[Any], content: str) -> None:
    assert answer(MINIMAX, text) == (calls, content)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (INDENTED, INDENTED),
        (f"\n{INDENTED}\n", INDENTED),
        ("</parameter> x", "</parameter> x"),
        ("</invoke>\n</minimax:tool_call>\n", "</invoke>\n</minimax:tool_call>\n"),
        ('<parameter name="path">', '<parameter name="path">'),  # is given already
        ("1.10", "1.10"),
    ],
)
def test_newlines_around_a_string_are_layout_where_there_are_two(written: str, value: str) -> None:
    assert answer(MINIMAX, block(call("ls", parameter("path", written)))) == ([("ls", {"path": value})], "")


@pytest.mark.parametrize(
    "text",
    [
        "The <minimax:tool_call> marker begins a call.",
        'A call is <invoke name="now">\n</invoke>.',
        '<invoke name="now"> is a call.\n</invoke>',
        '<invoke name="now">',
        block(call("rm_all", parameter("path", "/"))),
        block('<invoke id="now">\n</invoke>'),
        '<minimax:tool_call>\n<invoke name="ls',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(MINIMAX, text) == ([], text)


def test_an_undeclared_call_among_others_is_content() -> None:
    undeclared = call("rm_all", parameter("path", "/"))
    calls, content = answer(MINIMAX, block(LS_SRV, undeclared, LS_SRV))
    assert (calls, content) == ([LS, LS], undeclared.strip())


@pytest.mark.parametrize("size", range(len(block()), block(LS_SRV).index("</invoke>"), 5))
def test_a_call_that_is_cut_off_is_content(size: int) -> None:
    text = block(LS_SRV)[:size]
    calls, content = answer(MINIMAX, text, "cut")
    assert (calls, content.rstrip()) == ([], text.rstrip())
