from __future__ import annotations

import pytest

from common.parsing.formats.solar import Solar
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

LS = ("ls", {"path": "/srv"})


def call(name: str) -> str:
    return f'<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{{"path": "/srv"}}<|tool_call:end|>'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"<|tool_calls|>{call('ls')}{call('ls')}<|calls|>", [LS, LS], ""),
        (f"ok\n<|tool_calls|>{call('ls')}", [LS], "ok"),
        (call("ls"), [LS], ""),
        (call("rm_all"), [], call("rm_all")),
        ("<|tool_calls|> is a mark", [], "<|tool_calls|> is a mark"),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(Solar(), text, tools=TOOLS) == (calls, content)


def test_ids_are_kept() -> None:
    assert read_block(Solar(), call("ls"), TOOLS).calls == [("ls", "a1b2c3d4e5", '{"path": "/srv"}')]
