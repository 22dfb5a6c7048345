"""Gemma 4: `<|tool_call>call:NAME{KEY:VALUE}<tool_call|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from common.parsing.alternatives import alternatives
from common.parsing.formats.base import Call, Schema, Tool, ToolFormat, Tools
from common.parsing.formats.separated import separated
from common.parsing.formats.tool_names import read_tool
from common.parsing.json_text import JsonReader, Number, as_arguments, decoded, quoted
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "<|tool_call>"
_CALL: Final = "call:"
_END: Final = "<tool_call|>"
_QUOTE: Final = '<|"|>'
_BARE_KEY: Final = re.compile(r"[\w.-]+")
_DEPTH: Final = 8  # of schemas within schemas that are written as the model does; JSON below
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_VALUES: Final = frozenset({"enum", "const", "not"})
_OF_LISTS: Final = frozenset({"prefixItems", "uniqueItems", "contains"})


class Gemma4(ToolFormat):
    """
    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,2],KEY:{KEY:true}}<tool_call|>

    The call ends at the brace that closes it.
    """

    names = ("gemma4",)
    starts = (_START,)
    trigger = _START
    between = ""

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(_START)
        yield from scanner.blanks()
        yield from scanner.expect(_CALL)
        yield from scanner.blanks()
        tool = yield from read_tool(scanner, tools)
        yield from scanner.blanks()
        if (yield from scanner.peek(1)) != "{":
            raise NoCall
        yield CallBegin(tool.name)
        reader = JsonReader(scanner, tool.parameters, raw_quote=_QUOTE, stops=(_END,))
        yield from as_arguments(reader.object(tool.parameters))
        yield CallEnd()
        yield from scanner.blanks()
        yield from scanner.accept(_END)

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{_START}{_CALL}{call.name}{_written(decoded(call.arguments))}{_END}" for call in calls)

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        call = grammar.one_of(
            [f"{grammar.literal(_CALL + tool.name)} {_object_rule(tool.parameters, grammar)}" for tool in tools]
        )
        return f"{call} {grammar.literal(_END)}"


def _written(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case Number():
            return value
        case str():
            return quoted(value) if _QUOTE in value else f"{_QUOTE}{value}{_QUOTE}"
        case list():
            return f"[{','.join(map(_written, value))}]"
        case _:
            return f"{{{','.join(f'{_key(name)}:{_written(item)}' for name, item in value.items())}}}"


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _written(name)


# What cannot be written in a grammar as the model writes it is JSON there, which is read as well.


def _object_rule(schema: Mapping[str, Any], grammar: GrammarWriter, depth: int = 0) -> str:
    try:
        properties = grammar.properties(schema)
    except ValueError:
        return grammar.json(schema)
    if depth > _DEPTH or not (properties or schema.get("additionalProperties") is False):
        return grammar.json(schema)
    members = [
        (f"{grammar.literal(f'{_key(name)}:')} {_value_rule(value, grammar, depth + 1)}", required)
        for name, value, required in properties
    ]
    return f"{grammar.literal('{')} {separated(members, ',', grammar)} {grammar.literal('}')}"


def _value_rule(schema: Schema, grammar: GrammarWriter, depth: int) -> str:
    definitions = {} if isinstance(schema, bool) else {key: schema[key] for key in _DEFINITIONS if key in schema}

    def write() -> str:
        return grammar.one_of([_kind_rule({**part, **definitions}, grammar, depth) for part in alternatives(schema)])

    return grammar.rule_for(f"{depth} {json.dumps(schema)}", write)


def _kind_rule(schema: Mapping[str, Any], grammar: GrammarWriter, depth: int) -> str:
    kind = schema.get("type")
    if kind == "string":
        return f"{grammar.literal(_QUOTE)} {grammar.string_until(schema, _QUOTE)}"
    if kind == "object" and not schema.keys() & _OF_VALUES:
        return _object_rule(schema, grammar, depth)
    if kind == "array" and "items" in schema and depth < _DEPTH and not schema.keys() & (_OF_LISTS | _OF_VALUES):
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        items = schema["items"]
        item = _value_rule({**items, **definitions} if isinstance(items, Mapping) else items, grammar, depth + 1)
        return _list_rule(item, schema.get("minItems", 0), schema.get("maxItems"), grammar)
    return grammar.json(schema)


def _list_rule(item: str, least: int, most: int | None, grammar: GrammarWriter) -> str:
    begin, comma, end = map(grammar.literal, "[,]")
    more = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if most != 1 else ""
    some = f"{item} {more}" if most != 0 else ""
    return f"{begin} {some if least or not some else f'({some})?'} {end}"
