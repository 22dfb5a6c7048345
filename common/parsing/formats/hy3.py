"""Hunyuan 3.

    <tool_calls:opensource>
    <tool_call:opensource>NAME<tool_sep:opensource>
    <arg_key:opensource>KEY</arg_key:opensource>
    <arg_value:opensource>VALUE</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The newlines, the separator and the outer tags may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.formats.keyed_calls import KeyedCalls
from common.parsing.pieces import Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "<tool_calls:opensource>"
_END: Final = "</tool_calls:opensource>"
_CALLS: Final = KeyedCalls(":opensource", "<tool_sep:opensource>", (_END,))


class Hunyuan(ToolFormat):
    names = ("hy3", "hy_v3")
    starts = (_START, _CALLS.start)
    trigger = _START

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        if (yield from scanner.expect(*self.starts)) == _START:
            yield from scanner.blanks()
            yield from scanner.expect(_CALLS.start)
        while True:
            yield from _CALLS.read(scanner, tools)
            yield from scanner.blanks()
            if (yield from scanner.at_end()) or (yield from scanner.expect(_CALLS.start, _END)) == _END:
                return

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join([_START, *map(_CALLS.write, calls), _END])

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        start, newline = grammar.literal(_CALLS.start), grammar.literal("\n")
        call = grammar.one_of([f"{start} {_CALLS.rule(tool, grammar)} {newline}" for tool in tools])
        return f"{newline} ({call}){'+' if many else ''} {grammar.literal(_END)}"
