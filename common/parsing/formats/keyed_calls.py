"""Calls of keys and values in turn, as GLM and Hunyuan write them: the names of their tags differ by a suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.parsing.formats.base import Call, Schema, Tool, Tools
from common.parsing.formats.tagged_values import (
    Ending,
    check_forgotten,
    declared_name,
    members,
    read_key,
    read_value,
    tight,
)
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading, Waiting
from common.parsing.scanner import Scanner
from common.parsing.schemas import names_of
from common.parsing.values import ArgumentsWriter

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter


class KeyedCalls:
    """
    Args:
        suffix: of the names of tags.
        separator: stands after the name of a tool.
        after: tags that may follow a call where its own end is missing.
    """

    def __init__(self, suffix: str = "", separator: str = "", after: tuple[str, ...] = ()) -> None:
        self.start = f"<tool_call{suffix}>"
        self.end = f"</tool_call{suffix}>"
        self._separator = separator
        self._key = f"<arg_key{suffix}>"
        self._key_end = f"</arg_key{suffix}>"
        self._value = f"<arg_value{suffix}>"
        self._value_end = f"</arg_value{suffix}>"
        self._after = (self.start, *after)

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        """Read a call after its start, and its end."""
        name = yield from declared_name(scanner, tools)
        if self._separator and (yield from scanner.accept(self._separator)):
            yield from scanner.blanks()
        if not (yield from scanner.ahead(self._key, self.end, *self._after)):  # it is only mentioned
            raise NoCall
        yield CallBegin(name)
        writer = ArgumentsWriter(tools[name])
        missing = declared = names_of(tools[name].parameters, tools[name].parameters)
        tag = yield from scanner.accept(self._key, self.end)
        while tag == self._key:
            key, has_value = yield from self._read_key(scanner, declared)
            tag = self._value_end
            if has_value:  # otherwise the parameter is left out
                missing = [other for other in missing if other != key]
                yield writer.key(key)
                tag = yield from read_value(scanner, writer, self._endings(missing), written="tight")
            if tag == self._value_end:
                yield from scanner.blanks()
                tag = yield from scanner.accept(self._key, self.end)
        if tag is None:
            yield from check_forgotten(scanner, *self._after)
        yield writer.end()
        yield CallEnd()

    def _read_key(self, scanner: Scanner, declared: list[str]) -> Waiting[tuple[str, bool]]:
        """Read a key after its opening tag, and the opening tag of its value. Returns whether there is one."""
        key, tag = yield from read_key(scanner, self._key_end, self._value, declared=declared)
        if tag == self._value:
            return key, True
        yield from scanner.blanks()
        return key, (yield from scanner.accept(self._value)) is not None

    def _endings(self, missing: list[str]) -> list[Ending]:
        """What ends a value: its closing tag, or what shows that the model forgot that.

        Args:
            missing: names of parameters that have not been given yet. Where one of them stands, the last value has
                ended.
        """
        endings = [
            Ending((self._value_end,), (self._key, self._value, self.end, *self._after)),
            Ending((self.end,), self._after),
        ]
        keys = tuple(f"{name}{self._key_end}" for name in missing)
        return [*endings, Ending((self._key,), keys)] if missing else endings

    def write(self, call: Call) -> str:
        arguments = "".join(
            f"{self._key}{name}{self._key_end}\n{self._value}{tight(value)}{self._value_end}\n"
            for name, value in members(call.arguments)
        )
        return f"{self.start}{call.name}{self._separator}\n{arguments}{self.end}"

    def rule(self, tool: Tool, grammar: GrammarWriter) -> str:
        """A Lark expression for a call after its start, and its end."""
        key, key_end = grammar.literal(self._key), grammar.literal(f"{self._key_end}\n{self._value}")
        value_end = f"{self._value_end}\n"
        ends = (self._key, self.end)

        def parameter(name: str, schema: Schema) -> str:
            return f"{key} {name} {key_end} {grammar.value_until(schema, value_end, ends)}"

        parameters = grammar.parameters(tool.parameters, parameter)
        name = grammar.literal(f"{tool.name}{self._separator}\n")
        return f"{name} {parameters} {grammar.literal(self.end)}"
