from __future__ import annotations

import pytest

from common.parsing.answer import AnswerParser
from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call
from common.parsing.formats.hermes import Hermes
from common.parsing.pieces import CallEnd, Content
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import content_of
from tests.common.parsing.formats.tagged import answer, read_with
from tests.common.parsing.reading import TOOLS, read_block

HERMES = Hermes()
LS = ("ls", {"path": "/srv"})
NOW: tuple[str, object] = ("get-now.utc", {})


def test_it_is_written_as_templates_do() -> None:
    calls = [Call("ls", '{"path":"é"}'), Call("get-now.utc", "{}")]
    assert HERMES.write(calls) == (
        '<tool_call>\n{"name": "ls", "arguments": {"path":"é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get-now.utc", "arguments": {}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        ('{"name": "ls", "arguments": {"path": "/srv"}}', [LS]),
        # other names, another order, more members, none
        ('{"name": "ls", "parameters": {"path": "/srv"}}', [LS]),
        ('{"arguments": {"path": "/srv"}, "name": "ls"}', [LS]),
        ('{"type": "function", "name": "ls", "arguments": {"path": "/srv"}, "index": 0, "why": [1]}', [LS]),
        ('{"type": "function", "function": {"name": "ls", "arguments": "{\\"path\\": \\"/srv\\"}"}}', [LS]),
        ('{"function": "ls", "arguments": {"path": "/srv"}}', [LS]),
        ('{"name": "get-now.utc"}', [NOW]),
        ('{"name": "get-now.utc", "arguments": null}', [NOW]),
        ('{"name": "get-now.utc", "arguments": ""}', [NOW]),
        # typed whatever comes first
        ('{"arguments": {"path": 5, "depth": "2"}, "name": "ls"}', [("ls", {"path": "5", "depth": 2})]),
        ('{"arguments": "{\\"path\\": \\"/srv\\"}", "name": "ls"}', [LS]),
        # brackets too many, or too few
        ('{{"name": "ls", "arguments": {"path": "/srv"}}}', [LS]),
        ('{"name": "ls", "arguments": {"path": "/srv"}}}', [LS]),
        ('{"name": "ls", "arguments": {"path": "/srv"}', [LS]),
        ('{"name": "ls", "arguments": {"path": "/srv"', [LS]),
        ("{'name': 'ls', 'arguments': {'path': '/srv'}}", [LS]),
        # several
        ('{"name": "ls", "arguments": {"path": "/srv"}}\n{"name": "get-now.utc", "arguments": {}}', [LS, NOW]),
        ('{"name": "ls", "arguments": {"path": "/srv"}}, {"name": "get-now.utc"}', [LS, NOW]),
        ('[{"name": "ls", "arguments": {"path": "/srv"}}, {"name": "get-now.utc"}]', [LS, NOW]),
        ('[{"name": "ls", "arguments": {"path": "/srv"}}', [LS]),
    ],
)
def test_calls(inside: str, calls: list[object]) -> None:
    assert answer(HERMES, f"<tool_call>\n{inside}\n</tool_call>", tools=TOOLS) == (calls, "")


def test_blanks_and_the_end_may_be_missing() -> None:
    for end in ("</tool_call>", ""):
        text = f'<tool_call>{{"name": "ls", "arguments": {{"path": "/srv"}}}}{end}'
        assert answer(HERMES, text, tools=TOOLS) == ([LS], "")


def test_arguments_are_as_they_were_generated() -> None:
    arguments = '{"path":  "\\u00e9\\/", "depth" :7}'
    text = f'<tool_call>{{"name": "ls", "arguments": {arguments}}}</tool_call>'
    assert read_block(HERMES, text, TOOLS).calls == [("ls", None, arguments)]


def test_an_id_before_the_name_is_that_of_the_call() -> None:
    text = '<tool_call>{"id": "c1", "name": "get-now.utc"}</tool_call>'
    assert read_block(HERMES, text, TOOLS).calls == [("get-now.utc", "c1", "{}")]


@pytest.mark.parametrize(
    "inside",
    [
        *("the marker", "", "[]", "{}", "[1]", '{"a": 1}', '{"name": "rm_all", "arguments": {}}', '{"name": 5}'),
        *('{"name": ["ls"]}', '{"arguments": {}}', '{"name": "' + "a" * 300),
    ],
)
def test_what_is_no_call_is_content(inside: str) -> None:
    text = f"Use <tool_call>{inside}</tool_call> to call."
    assert answer(HERMES, text, tools=TOOLS) == ([], text)
    assert [type(piece) for piece in read_with(HERMES, text, tools=TOOLS)] == [Content]


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "ls", "arguments": [1]}',
        '{"name": "ls", "arguments": "text"}',
        '{"name": "ls", "arguments": {"path": /srv}}',
        '{"name": "ls", "path": "/srv"}',
        '{"name": "ls", 5}',
    ],
)
def test_what_is_no_call_after_all_is_content(inside: str) -> None:
    text = f"ok\n<tool_call>{inside}</tool_call>"
    assert answer(HERMES, text, tools=TOOLS) == ([], text)
    assert CallEnd(complete=False) in read_with(HERMES, text, tools=TOOLS)


@pytest.mark.parametrize("text", ["<tool_call>\n x", '<tool_call>{"a":', '<tool_call>{"name": "rm",', "<tool_call>[ 1"])
def test_what_cannot_become_a_call_is_not_held(text: str) -> None:
    parser = AnswerParser(TagDialect(None, [HERMES]), ReadOptions(TOOLS))
    assert content_of(parser.feed(text)) == text


@pytest.mark.parametrize("arguments", ['{"path": "/srv"', '{"path": "/s', '{"path"', ""])
def test_a_call_that_is_cut_is_none(arguments: str) -> None:
    whole = f'ok\n<tool_call>\n{{"name": "ls", "arguments": {arguments}'
    assert answer(HERMES, whole, "cut", TOOLS) == ([], whole)


def test_a_call_whose_braces_are_closed_is_complete_even_if_cut() -> None:
    text = '<tool_call>\n{"name": "ls", "arguments": {"path": "/srv"}}\n</tool'
    assert answer(HERMES, text, "cut", TOOLS)[0] == [LS]
