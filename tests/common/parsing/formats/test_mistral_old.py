from __future__ import annotations

import pytest

from common.parsing.formats.base import Call
from common.parsing.formats.mistral_old import MistralOld
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

OLD = MistralOld()
LS = ("ls", {"path": "/srv"})
ONE = '{"name": "ls", "arguments": {"path": "/srv"}}'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"[TOOL_CALLS] [{ONE}]", [LS], ""),
        (f'[TOOL_CALLS][{ONE}, {{"name": "get-now.utc", "arguments": {{}}}}]', [LS, ("get-now.utc", {})], ""),
        (f"[TOOL_CALLS]{ONE}", [LS], ""),
        ('[TOOL_CALLS][{"name": "ls", "arguments": "{\\"path\\": \\"/srv\\"}"}]', [LS], ""),
        (f"[TOOL_CALLS][{ONE}]\n\nDone [1].", [LS], "Done [1]."),
        (f"[TOOL_CALLS][{ONE}", [LS], ""),
        (f"[TOOL_CALLS][{ONE}, 5]", [LS], ", 5]"),
        ("See [TOOL_CALLS] [1].", [], "See [TOOL_CALLS] [1]."),
        ('[TOOL_CALLS][{"name": "ls", "arguments": [1]}]', [], '[TOOL_CALLS][{"name": "ls", "arguments": [1]}]'),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(OLD, text, tools=TOOLS) == (calls, content)


@pytest.mark.parametrize(
    "members",
    [
        '"name": "ls", "arguments": {"path": 1}, "id": "a1B2c3D4e"',
        '"id": "a1B2c3D4e", "name": "ls", "arguments": {"path": 1}',
        '"name": "ls", "id": "a1B2c3D4e", "arguments": {"path": 1}',
        '"arguments": {"path": 1}, "id": "a1B2c3D4e", "name": "ls"',
    ],
)
def test_an_id_is_kept_wherever_it_stands(members: str) -> None:
    calls = read_block(OLD, f"[TOOL_CALLS][{{{members}}}]", TOOLS).calls
    assert calls == [("ls", "a1B2c3D4e", '{"path": "1"}')]


@pytest.mark.parametrize("id", ["null", '""', '"\\ud83d"', "[1]"])
def test_what_cannot_be_an_id_is_none(id: str) -> None:
    calls = read_block(OLD, f'[TOOL_CALLS][{{"name": "ls", "arguments": {{}}, "id": {id}}}]', TOOLS).calls
    assert calls == [("ls", None, "{}")]


def test_ids_are_written() -> None:
    written = OLD.write([Call("ls", "{}", "a1B2c3D4e"), Call("ls", "{}")])
    assert written == (
        '[TOOL_CALLS][{"name": "ls", "arguments": {}, "id": "a1B2c3D4e"}, {"name": "ls", "arguments": {}}]'
    )
    assert [id for _, id, _ in read_block(OLD, written, TOOLS).calls] == ["a1B2c3D4e", None]
