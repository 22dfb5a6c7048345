from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from common.parsing.formats.base import Call
from common.parsing.formats.hy3 import Hunyuan
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import INDENTED, answer, calls_that_can_be_told, check_gives_back

HUNYUAN = Hunyuan()
UNDECIDABLE = re.compile(
    r"</arg_value:opensource>\s*(<arg_(key|value):opensource>|</?tool_calls?:opensource>)"
    r"|</tool_call:opensource>\s*(<tool_call:opensource>|</tool_calls:opensource>)"
    r"|<arg_key:opensource>\s*\w+</arg_key:opensource>"
)


def argument(name: str, value: str) -> str:
    return f"<arg_key:opensource>{name}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"


def call(name: str, *arguments: str) -> str:
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{''.join(arguments)}</tool_call:opensource>\n"


def block(*calls: str) -> str:
    return f"<tool_calls:opensource>\n{''.join(calls)}</tool_calls:opensource>"


LS_SRV = call("ls", argument("path", "/srv"))
LS = ("ls", {"path": "/srv"})


@given(calls=calls_that_can_be_told(UNDECIDABLE), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(calls: list[Call], sizes: Sequence[int]) -> None:
    check_gives_back(HUNYUAN, calls, sizes)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (block(LS_SRV), [LS], ""),
        (block(LS_SRV, call("now")), [LS, ("now", {})], ""),
        (f"ok\n{block(LS_SRV)}", [LS], "ok"),
        (block(LS_SRV).replace("\n", ""), [LS], ""),
        (block(LS_SRV).replace("<tool_sep:opensource>", ""), [LS], ""),
        (block(call("ls", argument("path", INDENTED))), [("ls", {"path": INDENTED})], ""),
        (block(call("ls", argument("path", "</arg_value>"))), [("ls", {"path": "</arg_value>"})], ""),
        # a key without a value
        (block(call("ls", "<arg_key:opensource>depth</arg_key:opensource>"), LS_SRV), [("ls", {}), LS], ""),
        # without outer tags
        (LS_SRV, [LS], ""),
        (f"{LS_SRV}</tool_calls:opensource>", [LS], ""),
        # without ends
        (block(LS_SRV).removesuffix("</tool_calls:opensource>"), [LS], ""),
        (block(LS_SRV.replace("</tool_call:opensource>", ""), LS_SRV), [LS, LS], ""),
        (block(LS_SRV.replace("</arg_value:opensource>\n", "")), [LS], ""),
    ],
)
def test_calls(text: str, calls: list[Any], content: str) -> None:
    assert answer(HUNYUAN, text) == (calls, content)


def test_what_is_no_call_is_content() -> None:
    undeclared = block(call("rm_all", argument("path", "/")))
    assert answer(HUNYUAN, undeclared) == ([], undeclared)
    assert answer(HUNYUAN, "<tool_calls:opensource> is a mark") == ([], "<tool_calls:opensource> is a mark")


def test_an_undeclared_call_among_others_is_content() -> None:
    undeclared = call("rm_all", argument("path", "/"))
    calls, content = answer(HUNYUAN, block(LS_SRV, undeclared, LS_SRV))
    assert (calls, content) == ([LS, LS], undeclared.strip())


@pytest.mark.parametrize("size", range(len(block()), block(LS_SRV).index("</tool_call:opensource>"), 7))
def test_a_call_that_is_cut_off_is_content(size: int) -> None:
    text = block(LS_SRV)[:size]
    calls, content = answer(HUNYUAN, text, "cut")
    assert (calls, content.rstrip()) == ([], text.rstrip())
