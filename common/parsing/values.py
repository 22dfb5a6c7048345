"""Values of arguments: from the text that a model writes to JSON of the declared type."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from common.parsing.formats.base import Schema, Tool
from common.parsing.json_text import JsonReader, escape, joined, kind_of, quoted
from common.parsing.pieces import CallArguments, NoCall, Waiting
from common.parsing.scanner import Scanner
from common.parsing.schemas import Kind, kinds_of, member_of

_TEXT: Final[frozenset[Kind]] = frozenset({"string"})
_TEXT_OR_NULL: Final[frozenset[Kind]] = frozenset({"string", "null"})
_LARGEST_EXPONENT: Final = 64  # of a number such as 1e3 that is written out for an integer


def convert(text: str, schema: Schema = True, root: Schema = True) -> str:
    """The JSON of a value that was written as bare text, such as between two tags.

    The declared type wins:
    - A string stays as it is, blanks and all. The text `null` is null where that is allowed beside.
    - Where other types are allowed beside strings, or no type is declared, what is JSON of such a type is that, as it
      is spelled; the rest is a string. NaN and Infinity are no JSON.
    - Everything else is read like JSON as models write it, see `JsonReader`; nothing at all is null where that is
      allowed. What cannot be read is a string.

    Args:
        root: what references in the schema refer to.
    """
    kinds = kinds_of(schema, root) or None
    if kinds == _TEXT or (kinds == _TEXT_OR_NULL and text != "null"):
        return quoted(text)
    bare = text.strip()
    if kinds is None or "string" in kinds:
        kind = kind_of(bare)
        value = _mended(bare, schema, root) if kind and (kinds is None or kind in kinds) else None
    elif not bare and "null" in kinds:
        value = "null"
    elif "boolean" in kinds and bare.lower() in ("true", "false"):
        value = bare.lower()
    else:
        value = _mended(bare, schema, root)
        if value and "integer" in kinds and "number" not in kinds:
            value = _whole(value)
    return quoted(text) if value is None else value


def is_text(schema: Schema, root: Schema = True) -> bool:
    """Whether a value is a string whatever is written."""
    return kinds_of(schema, root) == _TEXT


def _mended(text: str, schema: Schema, root: Schema) -> str | None:
    """What can be read as JSON, as strict JSON."""
    scanner = Scanner()
    scanner.feed(text)
    scanner.end("complete")
    try:
        next(_document(scanner, schema, root))
    except StopIteration as stop:
        value: str = stop.value
        return value
    except NoCall:
        return None
    raise AssertionError("a text that has ended is waited for")


def _document(scanner: Scanner, schema: Schema, root: Schema) -> Waiting[str]:
    value = yield from joined(JsonReader(scanner, root, tuples=True).value(schema))
    if not (yield from scanner.at_end()):
        raise NoCall
    return value


def _whole(number: str) -> str:
    """A number without its fraction where that is zero; other JSON as it is."""
    if kind_of(number) == "number":
        value = Decimal(number)
        if value.adjusted() <= _LARGEST_EXPONENT and value == value.to_integral_value():
            return str(int(value))
    return number


class ArgumentsWriter:
    """Writes the JSON of an object piece by piece.

    A parameter that a model gives twice stands in it twice, as in JSON that a model writes itself: what has been
    streamed cannot be taken back, and readers of JSON take the last one.

    Args:
        tool: whose parameters say what the values are.
    """

    def __init__(self, tool: Tool) -> None:
        self._root = tool.parameters
        self._schema: Schema = True
        self._kinds: frozenset[Kind] | None = None
        self._begun = False

    def key(self, name: str) -> CallArguments:
        """`{"name": ` or `, "name": `."""
        opening = ", " if self._begun else "{"
        self._begun = True
        self._schema = member_of(self._root, self._root, name)
        self._kinds = kinds_of(self._schema, self._root)
        return CallArguments(f"{opening}{quoted(name)}: ")

    def is_text(self, beginning: str = "") -> bool:
        """Whether the value of the last key is a string whatever is written, so that it can be passed on as it comes.

        Args:
            beginning: of the value, as far as it is known.
        """
        if self._kinds == _TEXT_OR_NULL:
            return not "null".startswith(beginning)
        return self._kinds == _TEXT

    def may_be_text(self) -> bool:
        """Whether the value of the last key may be a string."""
        return not self._kinds or "string" in self._kinds

    def value(self, text: str) -> CallArguments:
        """JSON of a whole value of the last key, written as bare text."""
        return CallArguments(convert(text, self._schema, self._root))

    def json(self, text: str) -> CallArguments:
        """JSON of a whole value of the last key, written as JSON; a string where it is none."""
        return CallArguments(_mended(text.strip(), self._schema, self._root) or quoted(text))

    def begin_text(self) -> CallArguments:
        return CallArguments('"')

    def text(self, piece: str) -> CallArguments:
        """More of a string; what JSON escapes is escaped."""
        return CallArguments(escape(piece))

    def end_text(self) -> CallArguments:
        return CallArguments('"')

    def end(self) -> CallArguments:
        """What closes the object; `{}` if nothing was written."""
        return CallArguments("}" if self._begun else "{}")
