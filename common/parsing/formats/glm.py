"""GLM 4.5 to 4.7, and Laguna.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

The newlines may be missing.
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

_CALLS: Final = KeyedCalls()


class Glm(ToolFormat):
    names = ("glm4_5", "glm4_6", "glm4_7", "laguna", "poolside_v1")
    starts = (_CALLS.start,)
    trigger = _CALLS.start
    between = "\n"

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(*self.starts)
        yield from _CALLS.read(scanner, tools)

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(map(_CALLS.write, calls))

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        return grammar.one_of([_CALLS.rule(tool, grammar) for tool in tools])
