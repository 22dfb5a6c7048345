"""Calls as in Python: Llama 3.2 and 4, LFM2, Olmo 3."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from common.parsing.formats.base import Call, Schema, Tool, ToolFormat, Tools
from common.parsing.formats.separated import separated
from common.parsing.formats.tool_names import read_tool
from common.parsing.json_text import JsonReader, Number, as_arguments, decoded, joined, quoted
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading, Streaming
from common.parsing.scanner import Scanner
from common.parsing.schemas import member_of

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_KEYWORD: Final = re.compile(r"[^\W\d][\w-]*")


class Pythonic(ToolFormat):
    """
    [NAME(KEY=VALUE, ...), ...]

    Attributes:
        layout: what stands before the calls of a block, behind `trigger`, and after them.
        separator: between them.
        end: string after a block; the model may leave it out.
    """

    names: ClassVar[tuple[str, ...]] = ("pythonic", "llama3_pythonic", "llama4_pythonic")
    starts: ClassVar[tuple[str, ...]] = ("<|python_start|>", "[")
    bare_starts: ClassVar[tuple[str, ...]] = ("[",)
    trigger: ClassVar[str] = ""
    layout: ClassVar[tuple[str, str]] = ("[", "]")
    separator: ClassVar[str] = ", "
    end: ClassVar[str] = "<|python_end|>"

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        listed = (yield from scanner.expect(*self.starts)) == "["
        yield from scanner.blanks()
        if not listed:
            listed = (yield from scanner.accept("[")) is not None
        while True:
            yield from scanner.blanks()
            yield from self._read_call(scanner, tools)
            yield from scanner.blanks()
            comma = yield from scanner.accept(",")
            yield from scanner.blanks()
            if listed and (yield from scanner.accept("]")):
                break
            if (yield from scanner.ahead(self.end)) or (yield from scanner.at_end()):
                break
            if listed and not comma:
                raise NoCall
        yield from scanner.blanks()
        yield from scanner.accept(self.end)

    def _read_call(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        tool = yield from read_tool(scanner, tools)
        yield from scanner.expect("(")
        yield CallBegin(tool.name)
        yield from as_arguments(self._arguments(scanner, tool.parameters))
        yield CallEnd()

    def _arguments(self, scanner: Scanner, parameters: Mapping[str, Any]) -> Streaming[None]:
        reader = JsonReader(scanner, parameters, stops=(self.end,), tuples=True)
        begun = False
        yield "{"
        while (yield from reader.more(")", begun=begun)):
            name = json.loads((yield from joined(reader.key())))
            yield f"{', ' if begun else ''}{quoted(name)}: "
            yield from reader.blanks()
            yield from reader.value(member_of(parameters, parameters, name))
            begun = True
        yield "}"

    def write(self, calls: Sequence[Call]) -> str:
        before, after = self.layout
        end = self.end if self.trigger else ""
        return f"{self.trigger}{before}{self.separator.join(map(_written, calls))}{after}{end}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        before, after = self.layout
        end = self.end if self.trigger else ""
        call = grammar.rule(grammar.one_of([_call_rule(tool, grammar) for tool in tools]))
        more = f"({grammar.literal(self.separator)} {call})*" if many else ""
        return f"{grammar.literal(before)} {call} {more} {grammar.literal(after + end)}"


class Lfm2(Pythonic):
    """
    <|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>
    """

    names = ("lfm2",)
    starts = ("<|tool_call_start|>",)
    bare_starts = ()
    trigger = "<|tool_call_start|>"
    end = "<|tool_call_end|>"


class Olmo3(Pythonic):
    """
    <function_calls>
    NAME(KEY=VALUE, ...)
    </function_calls>
    """

    names = ("olmo3",)
    starts = ("<function_calls>",)
    bare_starts = ()
    trigger = "<function_calls>"
    layout = ("\n", "\n")
    separator = "\n"
    end = "</function_calls>"


def _written(call: Call) -> str:
    arguments = [f"{_key(name)}={_literal(value)}" for name, value in decoded(call.arguments).items()]
    return f"{call.name}({', '.join(arguments)})"


def _key(name: str) -> str:
    return name if _KEYWORD.fullmatch(name) else quoted(name)


def _literal(value: Any) -> str:
    """What a value looks like in Python, whose strings may be written as those of JSON."""
    match value:
        case None | bool():
            return repr(value)
        case Number():
            return value
        case str():
            return quoted(value)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case _:
            return f"{{{', '.join(f'{quoted(key)}: {_literal(item)}' for key, item in value.items())}}}"


def _call_rule(tool: Tool, grammar: GrammarWriter) -> str:
    members = [
        (f"{grammar.literal(f'{_key(name)}=')} {_value_rule(schema, grammar)}", required)
        for name, schema, required in grammar.properties(tool.parameters)
    ]
    arguments = separated(members, ", ", grammar)
    if not members and (others := grammar.others(tool.parameters)):
        name, schema = others
        argument = f"{name} {grammar.literal('=')} {_value_rule(schema, grammar)}"
        arguments = f"({argument} ({grammar.literal(', ')} {argument})*)?"
    return f"{grammar.literal(f'{tool.name}(')} {arguments} {grammar.literal(')')}"


def _value_rule(schema: Schema, grammar: GrammarWriter) -> str:
    if isinstance(schema, Mapping) and schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
        return grammar.one_of([grammar.literal("True"), grammar.literal("False")])
    return grammar.json(schema)
