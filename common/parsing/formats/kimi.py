"""Kimi K2: a section of calls, each with an id that holds the name, and JSON."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, ToolFormat, Tools
from common.parsing.json_text import read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_SECTION: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_BEGIN: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_END: Final = "<|tool_call_end|>"
_PREFIX: Final = "functions."
_NUMBER: Final = re.compile(r":[0-9]+\Z")


class Kimi(ToolFormat):
    """
    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
    <|tool_calls_section_end|>

    The numbers of the ids go on over a whole conversation. The section around the calls may be missing.
    """

    names = ("kimi", "kimi_k2")
    starts = (_SECTION, _BEGIN)
    trigger = _SECTION

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        begun = (yield from scanner.expect(*self.starts)) == _BEGIN
        while True:
            if not begun:
                yield from scanner.blanks()
                yield from scanner.expect(_BEGIN)
            begun = False
            id, found = yield from scanner.until(_ARGUMENTS, limit=NAME_LENGTH)
            name = _name_in(id.strip(), tools)
            if found is None or name is None:
                raise NoCall
            yield CallBegin(name, id.strip())
            yield from read_object(scanner, tools[name], stops=(_END, _SECTION_END))
            yield CallEnd()
            yield from scanner.blanks()
            yield from scanner.accept(_END)
            yield from scanner.blanks()
            if (yield from scanner.accept(_SECTION_END)) or not (yield from scanner.ahead(_BEGIN)):
                return

    def write(self, calls: Sequence[Call]) -> str:
        return f"{_SECTION}{''.join(map(_written, range(len(calls)), calls))}{_SECTION_END}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        begin, number, arguments = grammar.literal(_BEGIN), "/[0-9]{1,4}/", grammar.literal(_ARGUMENTS)
        calls = [
            f"{grammar.literal(f'{_PREFIX}{tool.name}:')} {number} {arguments} {grammar.json(tool.parameters)}"
            for tool in tools
        ]
        call = f"{begin} {grammar.one_of(calls)} {grammar.literal(_END)}"
        return f"({call}){'+' if many else ''} {grammar.literal(_SECTION_END)}"


def _name_in(id: str, names: Container[str]) -> str | None:
    """The name of a tool that an id holds."""
    without_number = _NUMBER.sub("", id)
    for name in (id, without_number, without_number.removeprefix(_PREFIX)):
        if name in names:
            return name
    return None


def _written(index: int, call: Call) -> str:
    id = call.id if call.id and _name_in(call.id, {call.name}) else f"{_PREFIX}{call.name}:{index}"
    return f"{_BEGIN}{id}{_ARGUMENTS}{call.arguments}{_END}"
