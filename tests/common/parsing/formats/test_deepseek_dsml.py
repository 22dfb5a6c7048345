from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from common.parsing.formats.base import Call
from common.parsing.formats.deepseek_dsml import DeepSeekDsml
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import INDENTED, answer, calls_that_can_be_told, check_gives_back

DEEPSEEK = DeepSeekDsml()
UNDECIDABLE = re.compile(
    r"</｜DSML｜parameter>\s*</?｜DSML｜|</｜DSML｜invoke>\s*</｜DSML｜tool_calls>\s*<｜DSML｜|<｜DSML｜parameter "
)


def parameter(name: str, value: str, string: str | None) -> str:
    said = "" if string is None else f' string="{string}"'
    return f'<｜DSML｜parameter name="{name}"{said}>{value}</｜DSML｜parameter>\n'


def call(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def block(*calls: str) -> str:
    return f"<｜DSML｜tool_calls>\n{''.join(calls)}</｜DSML｜tool_calls>"


LS_SRV = call("ls", parameter("path", "/srv", "true"))
LS = ("ls", {"path": "/srv"})


@given(calls=calls_that_can_be_told(UNDECIDABLE, typed=True), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(calls: list[Call], sizes: Sequence[int]) -> None:
    check_gives_back(DEEPSEEK, calls, sizes)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (block(LS_SRV), [LS], ""),
        (block(LS_SRV, call("now")), [LS, ("now", {})], ""),
        (f"ok\n\n{block(LS_SRV)}", [LS], "ok"),
        # DeepSeek V3.2
        (block(LS_SRV).replace("tool_calls", "function_calls"), [LS], ""),
        # without outer tags, even amid a line: nothing else has such marks
        (LS_SRV, [LS], ""),
        (f"I look. {LS_SRV}", [LS], "I look."),
        # without ends
        (block(LS_SRV).removesuffix("</｜DSML｜tool_calls>"), [LS], ""),
        (block(LS_SRV.replace("</｜DSML｜invoke>", "")), [LS], ""),
        (block(LS_SRV.replace("</｜DSML｜parameter>", "")), [("ls", {"path": "/srv\n"})], ""),
        (
            block(call("ls", '<｜DSML｜parameter string="true" name="path">/srv', parameter("depth", "2", "false"))),
            [("ls", {"path": "/srv", "depth": 2})],
            "",
        ),
        ("<｜DSML｜tool_calls> is a mark", [], "<｜DSML｜tool_calls> is a mark"),
        (block(call("rm_all")), [], block(call("rm_all"))),
    ],
)
def test_calls(text: str, calls: list[Any], content: str) -> None:
    assert answer(DEEPSEEK, text) == (calls, content)


@pytest.mark.parametrize(
    ("name", "string", "written", "value"),
    [
        ("path", "true", INDENTED, INDENTED),
        ("path", "true", "\n\n", "\n\n"),
        ("path", "true", '{"a": 1}', '{"a": 1}'),
        ("other", "true", "1", "1"),
        ("note", "true", "null", "null"),
        ("other", "false", " [1, 2]\n", [1, 2]),
        ("other", "false", "[1, NaN, 2", [1, None, 2]),
        ("other", "false", "no JSON", "no JSON"),
        ("note", "false", "null", None),
        # The declared type wins.
        ("count", "true", "5", 5),
        ("path", "false", "5", "5"),
        ("path", "false", '"a"', "a"),
        ("path", "false", '"a', '"a'),
        # not said
        ("path", None, INDENTED, INDENTED),
        ("path", None, f"\n{INDENTED}\n", INDENTED),
        ("path", None, "1", "1"),
        ("count", None, "5", 5),
        ("other", None, "true", True),
    ],
)
def test_values(name: str, string: str | None, written: str, value: Any) -> None:
    text = block(call("edit", parameter(name, written, string)))
    assert answer(DEEPSEEK, text) == ([("edit", {name: value})], "")


@pytest.mark.parametrize("size", range(len(block()), block(LS_SRV).index("</｜DSML｜invoke>"), 5))
def test_a_call_that_is_cut_off_is_content(size: int) -> None:
    text = block(LS_SRV)[:size]
    calls, content = answer(DEEPSEEK, text, "cut")
    assert (calls, content.rstrip()) == ([], text.rstrip())
