"""Kimi K2: a section of calls, each with an id that holds the name, and JSON."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, Tools
from common.parsing.formats.sections import Section
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


class Kimi(Section):
    """
    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
    <|tool_calls_section_end|>

    The numbers of the ids go on over a whole conversation.
    """

    names = ("kimi", "kimi_k2")
    starts = (_SECTION, _BEGIN)
    trigger = _SECTION
    tokens = (_SECTION, _SECTION_END)
    call_tokens = (_BEGIN, _END)

    def read_call(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        id, found = yield from scanner.until(_ARGUMENTS, limit=NAME_LENGTH)
        name = _name_in(id.strip(), tools)
        if found is None or name is None:
            raise NoCall
        yield CallBegin(name, id.strip())
        yield from read_object(scanner, tools[name], stops=self.ends)
        yield CallEnd()

    def write_call(self, index: int, call: Call) -> str:
        id = call.id if call.id and _name_in(call.id, {call.name}) else f"{_PREFIX}{call.name}:{index}"
        return f"{id}{_ARGUMENTS}{call.arguments}"

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
