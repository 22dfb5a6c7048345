"""Solar Open: calls with ids between tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, Tools
from common.parsing.formats.sections import Section
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


class Solar(Section):
    """
    <|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>...<|calls|>

    An id has ten letters or digits. The last token ends the answer, so that it is missing in most texts.
    """

    names = ("solar", "solar_open")
    starts = (_BLOCK, _BEGIN)
    trigger = _BLOCK
    tokens = (_BLOCK, _BLOCK_END)
    call_tokens = (_BEGIN, _END)

    def read_call(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        id, _ = yield from scanner.until(_NAME, limit=NAME_LENGTH)
        name, _ = yield from scanner.until(_ARGUMENTS, limit=NAME_LENGTH)
        tool = tools.get(name.strip())
        if tool is None:
            raise NoCall
        yield CallBegin(tool.name, id.strip() or None)
        yield from read_object(scanner, tool, stops=self.ends)
        yield CallEnd()

    def write_call(self, index: int, call: Call) -> str:
        return f"{call.id or f'call{index:06}'}{_NAME}{call.name}{_ARGUMENTS}{call.arguments}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = [f"{grammar.literal(_NAME + tool.name + _ARGUMENTS)} {grammar.json(tool.parameters)}" for tool in tools]
        call = f"{grammar.literal(_BEGIN)} /[a-z0-9]{{10}}/ {grammar.one_of(calls)} {grammar.literal(_END)}"
        return f"({call}){'+' if many else ''} {grammar.literal(_BLOCK_END)}"
