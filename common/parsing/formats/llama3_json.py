"""Llama 3.1 to 3.3, xLAM and others: nothing but JSON."""

from __future__ import annotations

from common.parsing.formats.base import Tools
from common.parsing.formats.tagged_json import TaggedJson
from common.parsing.json_calls import read_calls
from common.parsing.pieces import NoCall, Reading
from common.parsing.scanner import Scanner

_TAG = "<|python_tag|>"


class Llama3Json(TaggedJson):
    """
    {"name": NAME, "parameters": {...}}

    Several are separated by `;` or newlines, or in a list. `<|python_tag|>` may stand before them.
    """

    names = ("llama3_json", "llama3", "llama4_json", "xlam")
    starts = (_TAG, "{", "[")
    bare_starts = ("{", "[")
    trigger = ""
    separator = "; "
    member_names = ("name", "parameters")

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.accept(_TAG)
        yield from scanner.blanks()
        while True:
            yield from read_calls(scanner, tools)
            yield from scanner.blanks()
            separated = yield from scanner.accept(";", ",")
            yield from scanner.blanks()
            yield from scanner.accept(_TAG)
            if not (yield from scanner.ahead("{", "[")):
                if separated:
                    raise NoCall
                return
