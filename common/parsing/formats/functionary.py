"""Functionary 3.1, and Llama 3.1 where it is asked to: JSON in `<function=NAME>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.formats.tool_names import read_tool
from common.parsing.json_text import read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "<function="
_END: Final = "</function>"


class Functionary(ToolFormat):
    """
    <function=NAME>{...}</function>
    """

    names = ("functionary", "functionary_v3_1")
    starts = (_START,)
    trigger = _START
    between = ""

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(_START)
        tool = yield from read_tool(scanner, tools)
        yield from scanner.expect(">")
        yield from scanner.blanks()
        if (yield from scanner.peek(1)) != "{":
            raise NoCall
        yield CallBegin(tool.name)
        yield from read_object(scanner, tool, stops=(_END,))
        yield CallEnd()
        yield from scanner.blanks()
        yield from scanner.accept(_END)

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{_START}{call.name}>{call.arguments}{_END}" for call in calls)

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = [f"{grammar.literal(f'{tool.name}>')} {grammar.json(tool.parameters)}" for tool in tools]
        return f"{grammar.one_of(calls)} {grammar.literal(_END)}"
