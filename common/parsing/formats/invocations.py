"""Calls in tags with attributes, as MiniMax and DeepSeek write them: the names of their tags differ by a prefix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from common.parsing.formats.base import NAME_LENGTH, Call, Schema, Tool, ToolFormat, Tools
from common.parsing.formats.tagged_values import Ending, bare, check_forgotten, members, read_value, tight
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading, Waiting
from common.parsing.scanner import Scanner
from common.parsing.schemas import names_of
from common.parsing.values import ArgumentsWriter, is_text

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_ENDS_NAME: Final = re.compile('[">]')
_ATTRIBUTE: Final = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


class InvocationFormat(ToolFormat):
    """A format of this kind. Its `starts` are the tags around all calls, the model's own first, and that of a call.

    The tags around all calls may be missing, as models forget them.

    Attributes:
        prefix: of the names of tags.
        typed: the model says of each value whether it is a string or JSON.
    """

    prefix: ClassVar[str] = ""
    typed: ClassVar[bool] = False

    def __init__(self) -> None:
        *wrappers, self._call = self.starts
        self._ends = [f"</{wrapper.removeprefix('<')}" for wrapper in wrappers]
        self._call_end = f"</{self.prefix}invoke>"
        self._parameter = f"<{self.prefix}parameter "
        self._parameter_end = f"</{self.prefix}parameter>"

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        at_line_start = scanner.last in ("", "\n", ">")  # a tag before it may be the end of a thought
        wrapped = (yield from scanner.expect(*self.starts)) != self._call
        if wrapped:
            yield from scanner.blanks()
            yield from scanner.expect(self._call)
        elif not (at_line_start or self.prefix):
            raise NoCall
        while True:
            yield from self._read_call(scanner, tools, wrapped)
            yield from scanner.blanks()
            if (yield from scanner.at_end()) or (yield from scanner.expect(self._call, *self._ends)) != self._call:
                return

    def _read_call(self, scanner: Scanner, tools: Tools, wrapped: bool) -> Reading[None]:
        """Read a call after its first mark."""
        name = (yield from _attributes(scanner, tools)).get("name", "")
        if name not in tools:
            raise NoCall
        if wrapped:
            yield CallBegin(name)
        yield from scanner.blanks()
        tag = yield from scanner.accept(self._parameter, self._call_end)
        if not wrapped:
            if tag is None:  # the call is only mentioned
                raise NoCall
            yield CallBegin(name)
        writer = ArgumentsWriter(tools[name])
        missing = declared = names_of(tools[name].parameters, tools[name].parameters)
        while tag == self._parameter:
            attributes = yield from _attributes(scanner, declared)
            if (key := attributes.get("name")) is None:
                raise NoCall
            missing = [other for other in missing if other != key]
            yield writer.key(key)
            written = _way_of_writing(attributes.get("string"), writer)
            tag = yield from read_value(scanner, writer, self._endings(missing), written=written)
            if tag == self._parameter_end:
                tag = yield from scanner.accept(self._parameter, self._call_end)
        if tag is None:
            yield from check_forgotten(scanner, *self.starts, *self._ends)
        yield writer.end()
        yield CallEnd()

    def _endings(self, missing: Sequence[str]) -> list[Ending]:
        """What ends a value: its closing tag, or what shows that the model forgot that.

        Args:
            missing: names of parameters that have not been given yet. Where one of them begins, the last value has
                ended.
        """
        endings = [Ending((self._parameter_end,), (self._parameter, self._call_end, *self.starts, *self._ends))]
        endings.append(Ending((self._call_end, self._ends[0]), self.starts))
        names = tuple(f'name="{name}"' for name in missing)
        return [*endings, Ending((self._parameter,), names)] if missing else endings

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join([self.starts[0], *map(self._written, calls), self._ends[0]])

    def _written(self, call: Call) -> str:
        lines = [f'{self._call}name="{call.name}">']
        for name, value in members(call.arguments):
            if self.typed:
                is_text = value.startswith('"')
                opening, text = f'{self._parameter}name="{name}" string="{str(is_text).lower()}">', bare(value)
            else:
                opening, text = f'{self._parameter}name="{name}">', tight(value)
            lines.append(opening + text + self._parameter_end)
        return "\n".join([*lines, self._call_end])

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = grammar.one_of([self._call_rule(tool, grammar) for tool in tools])
        newline, end = grammar.literal("\n"), grammar.literal(self._ends[0])
        return f"{newline} ({calls}){'+' if many else ''} {end}"

    def _call_rule(self, tool: Tool, grammar: GrammarWriter) -> str:
        value_end = f"{self._parameter_end}\n"
        ends = (self._parameter, self._call_end, self._ends[0])

        def parameter(name: str, schema: Schema) -> str:
            before, said = grammar.literal(f'{self._parameter}name="'), ""
            if not self.typed:
                value = grammar.value_until(schema, value_end, ends)
            elif is_text(schema, schema):
                said, value = ' string="true"', grammar.string_until(schema, value_end, ends)
            else:
                said, value = ' string="false"', f"{grammar.json(schema)} {grammar.literal(value_end)}"
            after = grammar.literal(f'"{said}>')
            return f"{before} {name} {after} {value}"

        begin = grammar.literal(f'{self._call}name="{tool.name}">\n')
        end = grammar.literal(f"{self._call_end}\n")
        return f"{begin} {grammar.parameters(tool.parameters, parameter)} {end}"


def _attributes(scanner: Scanner, declared: Iterable[str]) -> Waiting[dict[str, str]]:
    """Read the rest of a tag.

    Args:
        declared: names, which may hold what ends others.
    """
    odd = {f'name="{name}"': name for name in declared if _ENDS_NAME.search(name)}
    given = (yield from scanner.accept(*odd)) if odd else None
    text, closed = yield from scanner.until(">", limit=4 * NAME_LENGTH)
    if closed is None:
        raise NoCall
    attributes = {name: "".join(values) for name, *values in _ATTRIBUTE.findall(text)}
    return attributes if given is None else attributes | {"name": odd[given]}


def _way_of_writing(string: str | None, writer: ArgumentsWriter) -> Literal["tight", "text", "json"]:
    """How the value of the last key is written, by what the model says of it; the type that is declared wins."""
    match string:
        case "true" if writer.may_be_text():
            return "text"
        case "false":
            return "json"
        case _:
            return "tight"
