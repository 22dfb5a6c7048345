from __future__ import annotations

import pytest

from common.parsing.answer import AnswerParser
from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call
from common.parsing.formats.llama3_json import Llama3Json
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import calls_of, content_of, read, thoughts_of
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS

LLAMA = Llama3Json()
ONE = '{"name": "ls", "parameters": {"path": "/srv"}}'
OTHER = '{"name": "get-now.utc", "parameters": {}}'
LS = ("ls", {"path": "/srv"})
NOW: tuple[str, object] = ("get-now.utc", {})


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (ONE, [LS], ""),
        (f"\n\n{ONE}", [LS], ""),
        (f"<|python_tag|>{ONE}", [LS], ""),
        (f"Let me see. <|python_tag|>{ONE}", [LS], "Let me see."),
        (f"{ONE}; {OTHER}", [LS, NOW], ""),
        (f"{ONE}\n{OTHER}", [LS, NOW], ""),
        (f"<|python_tag|>{ONE};<|python_tag|>{OTHER}", [LS, NOW], ""),
        (f"[{ONE}, {OTHER}]", [LS, NOW], ""),
        ('{"name": "ls", "arguments": {"path": "/srv"}}', [LS], ""),
        (ONE.removesuffix("}"), [LS], ""),
        (f"{ONE} Done.", [LS], "Done."),
        (f"{ONE}; then", [LS], "; then"),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(LLAMA, text, tools=TOOLS) == (calls, content)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"a": 1}',
        "{}",
        "[1, 2]",
        "[x](http://a.b)",
        "{not JSON}",
        f"So: {ONE}",
        f"```json\n{ONE}\n```",
        "<|python_tag|>print(1)",
        '{"name": "ls"',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(LLAMA, text, "cut", TOOLS) == ([], text)


@pytest.mark.parametrize("text", ['{"a":', "[1", '{"type": "x", "b":', '{"name": "Ada",', "{ x y", "{'" + "a" * 300])
def test_what_cannot_become_a_call_is_not_held(text: str) -> None:
    parser = AnswerParser(TagDialect(None, [LLAMA]), ReadOptions(TOOLS))
    assert content_of(parser.feed(text)) == text


def test_a_call_behind_a_thought() -> None:
    dialect = TagDialect(("<think>", "</think>"), [LLAMA])
    pieces = read(dialect, f'<think>{{"a": {ONE}}}</think>\n\n{ONE}', ReadOptions(TOOLS))
    assert calls_of(pieces) == [Call("ls", '{"path": "/srv"}')]
    assert (thoughts_of(pieces), content_of(pieces)) == (f'{{"a": {ONE}}}', "")
