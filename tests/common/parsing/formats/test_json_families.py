from __future__ import annotations

import pytest

from common.parsing.formats.base import ToolFormat
from common.parsing.formats.json_families import (
    CommandR,
    CommandR7b,
    Functools,
    GigaChat3,
    Granite3,
    InternLm2,
    LongCat,
    MiniMaxM1,
    Nemotron,
    Phi4Mini,
    ToolCalls,
)
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS

ONE = '{"name": "ls", "arguments": {"path": "/srv"}}'
LS = ("ls", {"path": "/srv"})


@pytest.mark.parametrize(
    ("format", "text", "calls", "content"),
    [
        (Nemotron(), f"<TOOLCALL>[{ONE}]</TOOLCALL>", [LS], ""),
        (Nemotron(), f"<TOOLCALL>[{ONE}, {ONE}]", [LS, LS], ""),
        (ToolCalls(), f"ok\n<tool_calls>[{ONE}]</tool_calls>", [LS], "ok"),
        (MiniMaxM1(), f"<tool_calls>\n{ONE}\n{ONE}\n</tool_calls>", [LS, LS], ""),
        (Phi4Mini(), f"<|tool_call|>[{ONE}]<|/tool_call|>", [LS], ""),
        (Phi4Mini(), f"<|tool_call|>[{ONE}]", [LS], ""),
        (Phi4Mini(), f"<|tool_call|>[{ONE}] Done.", [LS], "Done."),
        (Granite3(), f"<|tool_call|>[{ONE}]\nDone [1].", [LS], "Done [1]."),
        (
            CommandR7b(),
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "ls", "parameters": {"path": "/srv"}}\n]'
            "<|END_ACTION|>",
            [LS],
            "",
        ),
        (
            InternLm2(),
            '<|action_start|><|plugin|>\n{"name": "ls", "parameters": {"path": "/srv"}}<|action_end|>\n',
            [LS],
            "",
        ),
        (LongCat(), f"<longcat_tool_call>\n{ONE}\n</longcat_tool_call>", [LS], ""),
        (GigaChat3(), f"<|function_call|>{ONE}", [LS], ""),
        (GigaChat3(), f"ok<|message_sep|>\n\nfunction call<|role_sep|>\n{ONE}", [LS], "ok"),
        (
            CommandR(),
            'ok\nAction:\n```json\n[\n    {\n        "tool_name": "ls",\n'
            '        "parameters": {"path": "/srv"}\n    }\n]```',
            [LS],
            "ok",
        ),
        (CommandR(), 'Action:\n```json\n[{"a": 1}]\n```', [], 'Action:\n```json\n[{"a": 1}]\n```'),
        (Functools(), f" functools[{ONE}, {ONE}]", [LS, LS], ""),
        (Functools(), "import functools\nx = functools[0]", [], "import functools\nx = functools[0]"),
    ],
)
def test_calls(format: ToolFormat, text: str, calls: list[object], content: str) -> None:
    assert answer(format, text, tools=TOOLS) == (calls, content)
