from __future__ import annotations

import pytest

from common.parsing.formats.base import Call, Tool, Tools
from common.parsing.formats.kimi import Kimi
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

KIMI = Kimi()
LS = ("ls", {"path": "/srv"})


def call(id: str, arguments: str = '{"path":"/srv"}') -> str:
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"ok {section(call('functions.ls:0'))} done", [LS], "ok done"),
        (section(call("functions.ls:0"), "\n", call("functions.get-now.utc:1", "{}")), [LS, ("get-now.utc", {})], ""),
        (call("functions.ls:0"), [LS], ""),
        (section(call("functions.ls:0")).removesuffix("<|tool_calls_section_end|>"), [LS], ""),
        (section(call("functions.ls:0", '{"path": "/srv"').replace("<|tool_call_end|>", "")), [LS], ""),
        (section(call("functions.rm_all:0")), [], section(call("functions.rm_all:0"))),
        (section(call("functions.ls:0", "[]")), [], section(call("functions.ls:0", "[]"))),
        ("<|tool_calls_section_begin|> is a mark", [], "<|tool_calls_section_begin|> is a mark"),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(KIMI, text, tools=TOOLS) == (calls, content)


@pytest.mark.parametrize("id", ["functions.ls:0", "functions.ls:12", "ls:3", "functions.ls", "ls", " functions.ls:0\n"])
def test_the_name_is_found_in_the_id(id: str) -> None:
    assert read_block(KIMI, section(call(id, "{}")), TOOLS).calls == [("ls", id.strip(), "{}")]


def test_an_exact_name_comes_first() -> None:
    tools = Tools([Tool("functions.ls", {}), Tool("ls", {}), Tool("ls:0", {})])
    names = [read_block(KIMI, section(call(id, "{}")), tools).calls[0][0] for id in ("functions.ls:0", "ls:1", "ls:0")]
    assert names == ["functions.ls", "ls", "ls:0"]


def test_ids_are_written_where_they_hold_the_name() -> None:
    written = KIMI.write([Call("ls", "{}", "functions.ls:7"), Call("ls", "{}", "call_1"), Call("ls", "{}")])
    assert [id for _, id, _ in read_block(KIMI, written, TOOLS).calls] == [
        "functions.ls:7",
        "functions.ls:1",
        "functions.ls:2",
    ]
