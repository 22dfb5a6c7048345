"""Apertus: a list of objects with one member, named like the tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, ToolFormat, Tools
from common.parsing.json_text import JsonReader, joined, quoted, read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "<|tools_prefix|>"
_END: Final = "<|tools_suffix|>"


class Apertus(ToolFormat):
    """
    <|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>
    """

    names = ("apertus",)
    starts = (_START,)
    trigger = _START

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        brackets = JsonReader(scanner, stops=(_END,))
        yield from scanner.expect(_START)
        yield from scanner.blanks()
        yield from scanner.expect("[")
        begun = False
        while (yield from brackets.more("]", begun=begun)):
            yield from scanner.expect("{")
            yield from scanner.blanks()
            tool = tools.get(json.loads((yield from joined(brackets.key(), NAME_LENGTH))))
            if tool is None:
                raise NoCall
            yield CallBegin(tool.name)
            yield from read_object(scanner, tool, stops=(_END,))
            yield from scanner.blanks()
            if not (yield from brackets.closed("}")):
                raise NoCall
            yield CallEnd()
            begun = True
        yield from scanner.blanks()
        yield from scanner.accept(_END)

    def write(self, calls: Sequence[Call]) -> str:
        return f"{_START}[{', '.join(f'{{{quoted(call.name)}: {call.arguments}}}' for call in calls)}]{_END}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = [
            f"{grammar.literal(f'{{{quoted(tool.name)}: ')} {grammar.json(tool.parameters)} {grammar.literal('}')}"
            for tool in tools
        ]
        call = grammar.rule(grammar.one_of(calls))
        more = f"({grammar.literal(', ')} {call})*" if many else ""
        return f"{grammar.literal('[')} {call} {more} {grammar.literal(']' + _END)}"
