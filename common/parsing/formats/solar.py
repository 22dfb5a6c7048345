"""Solar Open: calls with ids between tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, ToolFormat, Tools
from common.parsing.json_text import read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_BLOCK: Final = "<|tool_calls|>"
_BLOCK_END: Final = "<|calls|>"
_BEGIN: Final = "<|tool_call:begin|>"
_NAME: Final = "<|tool_call:name|>"
_ARGUMENTS: Final = "<|tool_call:args|>"
_END: Final = "<|tool_call:end|>"


class Solar(ToolFormat):
    """
    <|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>...<|calls|>

    An id has ten letters or digits. The last token ends the answer, so that it is missing in most texts.
    """

    names = ("solar", "solar_open")
    starts = (_BLOCK, _BEGIN)
    trigger = _BLOCK

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        begun = (yield from scanner.expect(*self.starts)) == _BEGIN
        while True:
            if not begun:
                yield from scanner.blanks()
                yield from scanner.expect(_BEGIN)
            begun = False
            id, _ = yield from scanner.until(_NAME, limit=NAME_LENGTH)
            name, _ = yield from scanner.until(_ARGUMENTS, limit=NAME_LENGTH)
            tool = tools.get(name.strip())
            if tool is None:
                raise NoCall
            yield CallBegin(tool.name, id.strip() or None)
            yield from read_object(scanner, tool, stops=(_END, _BLOCK_END))
            yield CallEnd()
            yield from scanner.blanks()
            yield from scanner.accept(_END)
            yield from scanner.blanks()
            if (yield from scanner.accept(_BLOCK_END)) or not (yield from scanner.ahead(_BEGIN)):
                return

    def write(self, calls: Sequence[Call]) -> str:
        return f"{_BLOCK}{''.join(map(_written, range(len(calls)), calls))}{_BLOCK_END}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = [f"{grammar.literal(_NAME + tool.name + _ARGUMENTS)} {grammar.json(tool.parameters)}" for tool in tools]
        call = f"{grammar.literal(_BEGIN)} /[a-z0-9]{{10}}/ {grammar.one_of(calls)} {grammar.literal(_END)}"
        return f"({call}){'+' if many else ''} {grammar.literal(_BLOCK_END)}"


def _written(index: int, call: Call) -> str:
    return f"{_BEGIN}{call.id or f'call{index:06}'}{_NAME}{call.name}{_ARGUMENTS}{call.arguments}{_END}"
