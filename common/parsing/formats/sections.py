"""Calls between tokens of their own, in a section between two more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from common.parsing.formats.base import Call, ToolFormat, Tools
from common.parsing.pieces import Reading
from common.parsing.scanner import Scanner


class Section(ToolFormat):
    """A section of calls. The tokens around it may be missing.

    Attributes:
        tokens: that begin and end the section.
        call_tokens: that begin and end a call in it.
        between_calls: text between two calls.
    """

    tokens: ClassVar[tuple[str, str]]
    call_tokens: ClassVar[tuple[str, str]]
    between_calls: ClassVar[str] = ""

    @property
    def ends(self) -> tuple[str, str]:
        """The tokens before which arguments have ended."""
        return self.call_tokens[1], self.tokens[1]

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        (_, end), (call, call_end) = self.tokens, self.call_tokens
        begun = (yield from scanner.expect(*self.starts)) == call
        while True:
            if not begun:
                yield from scanner.blanks()
                yield from scanner.expect(call)
            begun = False
            yield from self.read_call(scanner, tools)
            yield from scanner.blanks()
            yield from scanner.accept(call_end)
            yield from scanner.blanks()
            if (yield from scanner.accept(end)) or not (yield from scanner.ahead(call)):
                return

    def write(self, calls: Sequence[Call]) -> str:
        (begin, end), (call_begin, call_end) = self.tokens, self.call_tokens
        written = (f"{call_begin}{self.write_call(index, call)}{call_end}" for index, call in enumerate(calls))
        return f"{begin}{self.between_calls.join(written)}{end}"

    @abstractmethod
    def read_call(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        """Read what stands between the two tokens of a call, see `read()`."""

    @abstractmethod
    def write_call(self, index: int, call: Call) -> str:
        """The same as the model would write it.

        Args:
            index: of the call in the section.
        """
