"""Calls as JSON between two strings, as most models without a syntax of their own write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.json_calls import read_calls
from common.parsing.json_text import quoted
from common.parsing.pieces import Reading, Waiting
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter


class TaggedJson(ToolFormat):
    """
    A block holds a call, several one after the other, or lists of them: whatever of these the model writes is read.

    Attributes:
        end: string after the calls; empty where there is none.
        end_is_optional: text may follow without it.
        layout: text between `trigger` and the calls of a block, and between these and `end`.
        separator: between the calls of a block.
        member_names: of the name and the arguments.
        number_name: of a member before these two, which counts the calls; empty where there is none.
        late_ids: see `read_calls()`.
    """

    end: ClassVar[str] = ""
    end_is_optional: ClassVar[bool] = False
    layout: ClassVar[tuple[str, str]] = ("", "")
    separator: ClassVar[str] = ", "
    member_names: ClassVar[tuple[str, str]] = ("name", "arguments")
    number_name: ClassVar[str] = ""
    late_ids: ClassVar[bool] = False

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(self.trigger)
        yield from scanner.blanks()
        stops = (self.end,) if self.end else ()
        while True:
            yield from read_calls(scanner, tools, stops=stops, late_ids=self.late_ids)
            if not self.end or (yield from self._ended(scanner)):
                return

    def _ended(self, scanner: Scanner) -> Waiting[bool]:
        """Read what stands between a call and the next, or the end of the block. A bracket too many is passed over."""
        while True:
            yield from scanner.blanks()
            if (yield from scanner.accept(self.end)) or (yield from scanner.at_end()):
                return True
            if not (yield from scanner.accept("}", "]")):
                break
        if (yield from scanner.accept(",", ";")):
            yield from scanner.blanks()
            return False
        return self.end_is_optional and not (yield from scanner.ahead("{", "["))

    def write(self, calls: Sequence[Call]) -> str:
        before, after = self.layout
        items = [self._written(index, call) for index, call in enumerate(calls)]
        blocks = [self.separator.join(items)] if self.between is None else items
        return (self.between or "").join(f"{self.trigger}{before}{block}{after}{self.end}" for block in blocks)

    def _written(self, index: int, call: Call) -> str:
        number = f'"{self.number_name}": "{index}", ' if self.number_name else ""
        return f"{{{number}{self._head(call.name)}{call.arguments}}}"

    def _head(self, name: str) -> str:
        """What stands before the arguments."""
        name_name, arguments_name = self.member_names
        return f'"{name_name}": {quoted(name)}, "{arguments_name}": '

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        before, after = self.layout
        begin, end = grammar.literal("{"), grammar.literal("}")
        if self.number_name:
            begin, behind = grammar.literal(f'{{"{self.number_name}": "'), grammar.literal('", ')
            begin = f"{begin} /[0-9]{{1,4}}/ {behind}"
        kinds = [f"{grammar.literal(self._head(tool.name))} {grammar.json(tool.parameters)}" for tool in tools]
        call = grammar.rule(f"{begin} {grammar.one_of(kinds)} {end}")
        more = f"({grammar.literal(self.separator)} {call})*" if many and self.between is None else ""
        return f"{grammar.literal(before)} {call} {more} {grammar.literal(after + self.end)}"
