"""Qwen3-Coder, Qwen3.5 and Step 3.5.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A wrapper may hold several functions. Models forget its beginning, mostly after some text: then the function has to
begin a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.formats.base import NAME_LENGTH, Call, Tool, ToolFormat, Tools
from common.parsing.formats.tagged_values import (
    Ending,
    bare,
    check_forgotten,
    declared_name,
    members,
    read_key,
    read_value,
)
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner
from common.parsing.schemas import names_of
from common.parsing.values import ArgumentsWriter

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class QwenXml(ToolFormat):
    names = ("qwen3_coder", "qwen3_5", "step3_5", "step3_7")
    starts = (_START, _FUNCTION)
    trigger = _START
    between = "\n"

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        at_line_start = scanner.last in ("", "\n", ">")  # a tag before it may be the end of a thought
        wrapped = (yield from scanner.expect(*self.starts)) == _START
        if wrapped:
            yield from scanner.blanks()
            yield from scanner.expect(_FUNCTION)
        elif not at_line_start:
            raise NoCall
        while True:
            yield from _read_function(scanner, tools, wrapped)
            yield from scanner.blanks()
            if (yield from scanner.at_end()) or (yield from scanner.expect(_FUNCTION, _END)) == _END:
                return

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(map(_written, calls))

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        return grammar.one_of([_function_rule(tool, grammar) for tool in tools])


def _read_function(scanner: Scanner, tools: Tools, wrapped: bool) -> Reading[None]:
    """Read a function after its first mark."""
    name = yield from declared_name(scanner, tools)
    _, closed = yield from scanner.until(">", limit=NAME_LENGTH)
    if closed is None:
        raise NoCall
    if wrapped:
        yield CallBegin(name)
    yield from scanner.blanks()
    tag = yield from scanner.accept(_PARAMETER, _FUNCTION_END)
    if not wrapped:
        if tag is None:  # the function is only mentioned
            raise NoCall
        yield CallBegin(name)
    writer = ArgumentsWriter(tools[name])
    missing = declared = names_of(tools[name].parameters, tools[name].parameters)
    while tag == _PARAMETER:
        key, _ = yield from read_key(scanner, ">", declared=declared)
        missing = [other for other in missing if other != key]
        yield writer.key(key)
        tag = yield from read_value(scanner, writer, _endings(missing), written="spread")
        if tag == _PARAMETER_END:
            tag = yield from scanner.accept(_PARAMETER, _FUNCTION_END)
    if tag is None:
        yield from check_forgotten(scanner, _END, _START, _FUNCTION)
    yield writer.end()
    yield CallEnd()


def _endings(missing: Sequence[str]) -> list[Ending]:
    """What ends a value: its closing tag, or what shows that the model forgot that.

    Args:
        missing: names of parameters that have not been given yet. Where one of them begins, the last value has ended.
    """
    endings = [
        Ending((_PARAMETER_END,), (_PARAMETER, _FUNCTION_END, _END, _START, _FUNCTION)),
        Ending((_FUNCTION_END, _END), (_START,)),
    ]
    return [*endings, Ending((_PARAMETER,), tuple(f"{name}>\n" for name in missing))] if missing else endings


def _written(call: Call) -> str:
    parameters = "".join(
        f"{_PARAMETER}{name}>\n{bare(value)}\n{_PARAMETER_END}\n" for name, value in members(call.arguments)
    )
    return f"{_START}\n{_FUNCTION}{call.name}>\n{parameters}{_FUNCTION_END}\n{_END}"


def _function_rule(tool: Tool, grammar: GrammarWriter) -> str:
    key, key_end = grammar.literal(_PARAMETER), grammar.literal(">\n")
    value_end = f"\n{_PARAMETER_END}\n"
    ends = (_PARAMETER, _FUNCTION_END, _END)
    parameters = grammar.parameters(
        tool.parameters, lambda name, schema: f"{key} {name} {key_end} {grammar.value_until(schema, value_end, ends)}"
    )
    begin = grammar.literal(f"\n{_FUNCTION}{tool.name}>\n")
    end = grammar.literal(f"{_FUNCTION_END}\n{_END}")
    return f"{begin} {parameters} {end}"
