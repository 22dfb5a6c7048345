from __future__ import annotations

import pytest

from common.parsing.formats.base import Call, ToolFormat
from common.parsing.formats.deepseek_v3 import DeepSeekV3, DeepSeekV31
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
LS = ("ls", {"path": "/srv"})


def call(text: str) -> str:
    return f"<｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜>"


OLDER = call('function<｜tool▁sep｜>ls\n```json\n{"path": "/srv"}\n```')
NEWER = call('ls<｜tool▁sep｜>{"path": "/srv"}')


def test_they_are_written_as_templates_do() -> None:
    calls = [Call("ls", '{"path": "/srv"}')] * 2
    assert DeepSeekV3().write(calls) == f"{BEGIN}{OLDER}\n{OLDER}{END}"
    assert DeepSeekV31().write(calls) == f"{BEGIN}{NEWER}{NEWER}{END}"


@pytest.mark.parametrize("format", [DeepSeekV3(), DeepSeekV31()])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"ok\n{BEGIN}{OLDER}{END}", [LS], "ok"),
        (f"{BEGIN}{NEWER}{END}\nDone.", [LS], "Done."),
        (f"{BEGIN}\n{OLDER}\n{NEWER}\n{END}", [LS, LS], ""),
        (NEWER, [LS], ""),
        (f"{BEGIN}{NEWER}", [LS], ""),
        (f"{BEGIN}{OLDER}".removesuffix("\n```<｜tool▁call▁end｜>"), [LS], ""),
        (f"{BEGIN}{call('ls<｜tool▁sep｜>```json{}```')}{END}", [("ls", {})], ""),
        (f"{BEGIN}{call('rm_all<｜tool▁sep｜>{}')}", [], f"{BEGIN}{call('rm_all<｜tool▁sep｜>{}')}"),
        (f"{BEGIN} is a mark", [], f"{BEGIN} is a mark"),
    ],
)
def test_calls(format: ToolFormat, text: str, calls: list[object], content: str) -> None:
    assert answer(format, text, tools=TOOLS) == (calls, content)
