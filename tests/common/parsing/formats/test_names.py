"""Names of tools and parameters that hold what ends names."""

from __future__ import annotations

import json

import pytest

from common.parsing.dialect import ReadOptions
from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.formats.registry import FORMATS
from common.parsing.tags import TagDialect
from tests.common.parsing.answers import calls_of, content_of, read

NAMES = (
    *("a-b", "x y", " padded ", "é", "名", "a>b", "<k>", "</parameter>", 'q"', '"dq"', "'s'", "b:c", "d=e", "{f}"),
    *("[g]", "h,i", "j\\k", "l\nm", "n`", "$ref"),
)


TOOL_NAMES = ("a.b", "a/b", "a:0", "a|b", "a>b", "<f>", 'a"b', "a'b", "a(b", "a[b]", "a\\b", "functions.f", "é", "名前")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_declared_tools_are_found_by_any_name(format: ToolFormat) -> None:
    for name in TOOL_NAMES:
        tools = Tools([Tool("a", {}), Tool("f", {}), Tool(name, {})])
        pieces = read(TagDialect(None, [format]), format.write([Call(name, '{"x":1}', "call_1")]), ReadOptions(tools))
        [call] = calls_of(pieces)
        assert (call.name, json.loads(call.arguments)) == (name, {"x": 1})
        assert content_of(pieces) == ""


@pytest.mark.parametrize("value", ["x", 1])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_declared_names_are_read_as_they_are(format: ToolFormat, value: object) -> None:
    schema = {"type": "string"} if isinstance(value, str) else {}
    for names in [*((name,) for name in NAMES), NAMES]:
        tool = Tool("do_it", {"type": "object", "properties": dict.fromkeys(names, schema)})
        arguments = dict.fromkeys(names, value)
        written = format.write([Call("do_it", json.dumps(arguments), "call_1")])
        pieces = read(TagDialect(None, [format]), written, ReadOptions(Tools([tool])))
        [call] = calls_of(pieces)
        assert json.loads(call.arguments) == arguments, names
        assert content_of(pieces) == "", names
