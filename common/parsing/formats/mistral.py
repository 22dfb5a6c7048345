"""Mistral from version 11 of its tokenizer on: `[TOOL_CALLS]NAME[ARGS]{...}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, ToolFormat, Tools
from common.parsing.formats.tool_names import read_tool
from common.parsing.json_text import read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "[TOOL_CALLS]"
_ID: Final = "[CALL_ID]"
_ARGUMENTS: Final = "[ARGS]"


class Mistral(ToolFormat):
    """
    [TOOL_CALLS]NAME[ARGS]{...}

    `[CALL_ID]ID` may stand behind the name. The arguments end the call: what follows is text, or the next call.
    """

    names = ("mistral", "mistral_v11", "magistral", "devstral")
    starts = (_START,)
    trigger = _START
    between = ""

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(_START)
        yield from scanner.blanks()
        tool = yield from read_tool(scanner, tools)
        yield from scanner.blanks()
        id = None
        if (yield from scanner.accept(_ID)):
            id, found = yield from scanner.until(_ARGUMENTS, limit=NAME_LENGTH)
            if found is None:
                raise NoCall
        elif not (yield from scanner.accept(_ARGUMENTS)) and (yield from scanner.peek(1)) != "{":
            raise NoCall
        yield CallBegin(tool.name, id.strip() or None if id else None)
        yield from read_object(scanner, tool, stops=self.starts)
        yield CallEnd()

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{_START}{call.name}{_ARGUMENTS}{call.arguments}" for call in calls)

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        return grammar.one_of(
            [f"{grammar.literal(tool.name + _ARGUMENTS)} {grammar.json(tool.parameters)}" for tool in tools]
        )
