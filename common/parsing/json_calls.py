"""Calls that are objects in JSON, of a name and arguments -> pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from common.parsing.formats.base import NAME_LENGTH, Tool, Tools
from common.parsing.json_text import JsonReader, joined, read_object, typed_arguments
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

_NAMES: Final = frozenset({"name", "tool_name", "function"})
_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_IDS: Final = frozenset({"id", "call_id"})
_LAYOUT: Final = frozenset({"type", "index", "tool_call_id"})  # members that say nothing; the last one just counts
_ID: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,256}")
_KNOWN: Final = _NAMES | _ARGUMENTS | _IDS | _LAYOUT


def read_calls(scanner: Scanner, tools: Tools, *, stops: Sequence[str] = (), late_ids: bool = False) -> Reading[None]:
    """Read a call such as `{"name": "ls", "arguments": {"path": "/srv"}}`, or a list of them.

    Members come in any order: arguments that come before the name are held until it is known. An object that holds
    nothing but another one, as in `{{"name": ...}}`, stands for that.

    Args:
        stops: see `JsonReader`.
        late_ids: the model gives an id after the arguments, so a call is announced when that is known.

    Raises:
        NoCall: as soon as it is known that there is none.
    """
    if not (yield from scanner.accept("[")):
        yield from _CallReader(scanner, tools, stops, late_ids).read()
        return
    brackets = JsonReader(scanner, stops=stops)
    begun = False
    while (yield from brackets.more("]", begun=begun)):
        yield from _CallReader(scanner, tools, stops, late_ids).read()
        begun = True
    if not begun:
        raise NoCall


class _CallReader:
    """Reads one call."""

    def __init__(self, scanner: Scanner, tools: Tools, stops: Sequence[str], late_ids: bool) -> None:
        self._scanner = scanner
        self._tools = tools
        self._stops = stops
        self._late_ids = late_ids
        self._json = JsonReader(scanner, stops=stops)
        self._tool: Tool | None = None
        self._id: str | None = None
        self._announced = False
        self._given = False  # arguments
        self._held: str | None = None  # arguments that were given before the call was announced
        self._others = False  # members that mean nothing in a call

    def read(self) -> Reading[None]:
        yield from self._members()
        if self._tool is None or (self._others and not self._given):
            raise NoCall
        if not self._announced:
            yield from self._announce(self._tool)
        if not self._given:
            yield CallArguments("{}")
        yield CallEnd()

    def _members(self) -> Reading[None]:
        yield from self._scanner.expect("{")
        open_braces, begun = 1, False
        while open_braces:
            if not (yield from self._json.more("}", begun=begun)):
                open_braces, begun = open_braces - 1, True
            elif not begun and (yield from self._scanner.accept("{")):
                open_braces += 1
            else:
                key = json.loads((yield from joined(self._json.key(), NAME_LENGTH)))
                if self._tool is None and key not in _KNOWN:
                    raise NoCall  # an answer in JSON
                yield from self._scanner.blanks()
                if key == "function" and (yield from self._scanner.accept("{")):
                    open_braces, begun = open_braces + 1, False
                else:
                    yield from self._member(key)
                    begun = True

    def _member(self, key: str) -> Reading[None]:
        if key in _NAMES and self._tool is None:
            self._tool = self._tools.get(json.loads((yield from joined(self._json.string(), NAME_LENGTH))))
            if self._tool is None:
                raise NoCall
        elif key in _ARGUMENTS and not self._given:
            self._given = True
            if self._tool is not None and self._announced:
                yield from read_object(self._scanner, self._tool, stops=self._stops)
            else:
                self._held = yield from joined(self._json.value())
        elif key in _IDS:
            id = json.loads((yield from joined(self._json.value())))
            if isinstance(id, str | int) and _ID.fullmatch(str(id)):
                self._id = str(id)
        else:
            yield from joined(self._json.value())
            self._others |= key not in _LAYOUT

        if self._tool is not None and not self._announced and (self._id or not self._late_ids):
            yield from self._announce(self._tool)

    def _announce(self, tool: Tool) -> Reading[None]:
        self._announced = True
        yield CallBegin(tool.name, self._id)
        if self._held is not None:
            yield CallArguments(typed_arguments(self._held, tool))
