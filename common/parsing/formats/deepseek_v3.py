"""DeepSeek V3, R1 and V3.1: calls between tokens of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, Tools
from common.parsing.formats.sections import Section
from common.parsing.json_text import read_object
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_BLOCK: Final = "<｜tool▁calls▁begin｜>"
_BLOCK_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_END: Final = "<｜tool▁call▁end｜>"
_FENCE: Final = "```"
_NAME: Final = re.compile(r"[^\s{`]*")


class DeepSeekV3(Section):
    """
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    What a model of the other kind writes is read as well.
    """

    names: ClassVar[tuple[str, ...]] = ("deepseek_v3", "deepseek_r1")
    starts = (_BLOCK, _BEGIN)
    trigger = _BLOCK
    tokens = (_BLOCK, _BLOCK_END)
    call_tokens = (_BEGIN, _END)
    between_calls: ClassVar[str] = "\n"
    layout: ClassVar[tuple[str, str, str]] = (f"function{_SEPARATOR}", "\n```json\n", "\n```")

    def read_call(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        before, found = yield from scanner.until(_SEPARATOR, limit=NAME_LENGTH)
        if found is None:
            raise NoCall
        yield from scanner.blanks()
        behind = yield from scanner.run(_NAME)
        tool = tools.get(behind or before.strip())
        if tool is None:
            raise NoCall
        yield CallBegin(tool.name)
        yield from scanner.blanks()
        yield from scanner.accept(_FENCE, f"{_FENCE}json")
        yield from read_object(scanner, tool, stops=(_FENCE, *self.ends))
        yield CallEnd()
        yield from scanner.blanks()
        yield from scanner.accept(_FENCE)

    def write_call(self, index: int, call: Call) -> str:
        before_name, behind_name, behind_arguments = self.layout
        return f"{before_name}{call.name}{behind_name}{call.arguments}{behind_arguments}"

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        before_name, behind_name, behind_arguments = self.layout
        calls = [
            f"{grammar.literal(f'{_BEGIN}{before_name}{tool.name}{behind_name}')} {grammar.json(tool.parameters)}"
            for tool in tools
        ]
        call = f"{grammar.one_of(calls)} {grammar.literal(behind_arguments + _END)}"
        between = grammar.literal(self.between_calls) if self.between_calls else ""
        more = f"({between} {call})*" if many else ""
        return f"{call} {more} {grammar.literal(_BLOCK_END)}"


class DeepSeekV31(DeepSeekV3):
    """
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    names = ("deepseek_v3_1", "deepseek_v3_2_exp")
    between_calls = ""
    layout = ("", _SEPARATOR, "")
