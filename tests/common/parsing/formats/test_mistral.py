from __future__ import annotations

import pytest

from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call
from common.parsing.formats.mistral import Mistral
from common.parsing.formats.mistral_old import MistralOld
from common.parsing.pieces import CallBegin
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import calls_of, content_of, read
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

MISTRAL = Mistral()
LS = ("ls", {"path": "/srv"})
NOW: tuple[str, object] = ("get-now.utc", {})


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('[TOOL_CALLS]ls[ARGS]{"path":"/srv"}\n\nDone.', [LS], "Done."),
        ('[TOOL_CALLS]ls[ARGS]{"path": "/srv"}[TOOL_CALLS]get-now.utc[ARGS]{}', [LS, NOW], ""),
        ('[TOOL_CALLS]ls[CALL_ID]a1B2c3D4e[ARGS]{"path": "/srv"}', [LS], ""),
        ('ok\n[TOOL_CALLS] ls [ARGS] {"path": "/srv"}', [LS], "ok"),
        ('[TOOL_CALLS]ls{"path": "/srv"}', [LS], ""),
        ('[TOOL_CALLS]ls[ARGS]"{\\"path\\": \\"/srv\\"}"', [LS], ""),
        ('[TOOL_CALLS]ls[ARGS]"{\\"path\\": \\"/srv\\"}"\nDone.', [LS], "Done."),
        ('[TOOL_CALLS]ls[ARGS]{"path": "/srv"', [LS], ""),
        ('[TOOL_CALLS]ls[ARGS]{"path": "/srv"[TOOL_CALLS]get-now.utc[ARGS]{}', [LS, NOW], ""),
        ('[TOOL_CALLS]ls[ARGS]{"path": "[TOOL_CALLS]"}', [("ls", {"path": "[TOOL_CALLS]"})], ""),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(MISTRAL, text, tools=TOOLS) == (calls, content)


def test_an_id_is_kept() -> None:
    assert read_block(MISTRAL, "[TOOL_CALLS]ls[CALL_ID]a1B2c3D4e[ARGS]{}", TOOLS).calls == [("ls", "a1B2c3D4e", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS] is the mark",
        "[TOOL_CALLS]rm_all[ARGS]{}",
        "[TOOL_CALLS]ls is it",
        "[TOOL_CALLS]ls[ARGS]",
        "[TOOL_CALLS]ls[ARGS][1]",
        "[TOOL_CALLS]ls[CALL_ID]",
        '[TOOL_CALLS]ls[ARGS]{"path": ]',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(MISTRAL, text, tools=TOOLS) == ([], text)


def test_a_call_that_is_cut_is_none() -> None:
    text = 'Well. [TOOL_CALLS]ls[ARGS]{"path": "/srv"'
    assert answer(MISTRAL, text, "cut", TOOLS) == ([], text)


def test_forms_that_begin_alike_are_told_apart() -> None:
    for formats in ([Mistral(), MistralOld()], [MistralOld(), Mistral()]):
        dialect = TagDialect(None, formats)
        for call in ('ls[ARGS]{"path": "/srv"}', ' [{"name": "ls", "arguments": {"path": "/srv"}}]'):
            pieces = read(dialect, f"[TOOL_CALLS]{call}", ReadOptions(TOOLS))
            assert calls_of(pieces) == [Call("ls", '{"path": "/srv"}')]
            assert content_of(pieces) == ""
            assert isinstance(pieces[0], CallBegin)
