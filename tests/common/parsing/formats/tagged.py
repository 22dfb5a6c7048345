"""What the tests of the formats that look like XML share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from hypothesis import strategies as st

from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.pieces import Piece
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import calls_of, content_of, read
from tests.common.parsing.reading import strict

LS: Final = Tool("ls", {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}})
EDIT: Final = Tool(
    "edit",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "old_string": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "all": {"type": "boolean"},
            "lines": {"type": "array"},
            "options": {"type": "object"},
            "other": {},
        },
    },
)
NOW: Final = Tool("now", {})
TOOLS: Final = Tools([LS, EDIT, NOW])

INDENTED: Final = "    if ok:\n        go()\n"

_TAGS: Final = (
    *("<tool_call>", "</tool_call>", "<function=ls>", "</function>", "<parameter=path>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    *("<minimax:tool_call>", '<invoke name="ls">', '<parameter name="path">', "</invoke>", "</minimax:tool_call>"),
    *("<｜DSML｜tool_calls>", "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</arg_value:opensource>"),
    *("<think>", "</think>", "[TOOL_CALLS]", "`", '"', "'", "\\", "{", "}", "null", "true", "1.10", "NaN"),
    *("<", ">", " ", "    ", "\n", "\n\n", "\t", "\r\n", "\x00", "\u2028", "é", "😀", "a"),
)
_texts: Final = st.lists(st.sampled_from(_TAGS), max_size=8).map("".join) | st.text(max_size=12)
_json_values: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(_texts, values, max_size=3),
    max_leaves=6,
)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_edit_arguments: Final = st.fixed_dictionaries(
    {},
    optional={
        "path": _texts,
        "old_string": _texts,
        "note": st.none() | _texts,
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "all": st.booleans(),
        "lines": st.lists(_json_values, max_size=3),
        "options": st.dictionaries(_texts, _json_values, max_size=3),
        "other": _json_values,
    },
)
_arguments: Final[st.SearchStrategy[tuple[str, dict[str, Any]]]] = st.one_of(
    st.tuples(st.just("edit"), _edit_arguments), st.tuples(st.just("now"), st.just({}))
)


def calls_that_can_be_told(undecidable: re.Pattern[str], *, typed: bool = False) -> st.SearchStrategy[list[Call]]:
    """Calls that a format must give back as they were.

    Args:
        undecidable: text of a value that the format itself cannot tell from the end of the value.
        typed: the format says whether a value is a string.
    """

    def can_be_told(arguments: dict[str, Any]) -> bool:
        texts = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in arguments.values()
        ]
        if any(undecidable.search(f"{text}\n") for text in texts):
            return False
        other = arguments.get("other")
        return typed or (arguments.get("note") != "null" and not (isinstance(other, str) and _is_json(other.strip())))

    return st.lists(
        _arguments.filter(lambda call: can_be_told(call[1])).map(
            lambda call: Call(call[0], json.dumps(call[1], ensure_ascii=False))
        ),
        min_size=1,
        max_size=3,
    )


def read_with(
    format: ToolFormat,
    text: str,
    sizes: Sequence[int] = (1,),
    ending: Literal["complete", "cut"] = "complete",
    tools: Tools = TOOLS,
) -> list[Piece]:
    return read(TagDialect(None, [format]), text, ReadOptions(tools), sizes=sizes, ending=ending)


def answer(
    format: ToolFormat,
    text: str,
    ending: Literal["complete", "cut"] = "complete",
    tools: Tools = TOOLS,
) -> tuple[list[tuple[str, Any]], str]:
    """Calls and content of an answer, which have to be the same wherever it is cut in two, and char by char."""
    whole = read_with(format, text, [len(text)], ending, tools)
    assert read_with(format, text, [1], ending, tools) == whole
    for size in range(1, len(text)):
        assert read_with(format, text, [size, len(text)], ending, tools) == whole, text[:size]
    return [(call.name, strict(call.arguments)) for call in calls_of(whole)], content_of(whole)


def check_gives_back(format: ToolFormat, calls: Sequence[Call], sizes: Sequence[int]) -> None:
    blocks = [calls] if format.between is None else [[call] for call in calls]
    text = (format.between or "").join(map(format.write, blocks))
    pieces = read_with(format, text, sizes)
    assert calls_of(pieces) == list(calls)
    assert content_of(pieces) == ""
    assert pieces == read_with(format, text, [len(text)])
