"""JSON as models write it -> strict JSON, while it is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from common.parsing.formats.base import Schema, Tool
from common.parsing.pieces import CallArguments, NoCall, Reading, Returning, Streaming, Waiting
from common.parsing.scanner import Scanner
from common.parsing.schemas import Kind, items_of, kinds_of, member_of

_DEPTH: Final = 64  # of nesting; a model that goes deeper repeats itself
_NUMBER_LENGTH: Final = 1000  # likewise; Python's json refuses integers of more than 4,300 digits

_OTHER_BLANK: Final = re.compile(r"[^ \t\n\r]")
_WORD: Final = re.compile(r"[-+.\w]*")
_KEY: Final = re.compile(r"""[^\s:=,"'<>{}\[\]()]*""")
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DECIMAL: Final = re.compile(r"([-+]?)([0-9]+(?:_[0-9]+)*)?(?:\.([0-9]+(?:_[0-9]+)*)?)?([eE][-+]?[0-9]+)?")
_BARE: Final = re.compile(r"\w[-.\w]*")
_AFTER_STRING: Final = ("", ",", ":", "=", "}", "]", ")")
_STRICT_TEXT: Final = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_TO_ESCAPE: Final = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_SHORT_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NO_NUMBERS: Final = frozenset({"nan", "infinity", "inf"})
_KINDS: Final[Mapping[str, Kind]] = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}


class _Types(NamedTuple):
    """What a schema allows; None where it does not say."""

    kinds: frozenset[Kind] | None

    @classmethod
    def of(cls, schema: Schema, root: Schema) -> _Types:
        return cls(kinds_of(schema, root))

    def allow(self, kind: Kind) -> bool:
        return not self.kinds or kind in self.kinds or (kind == "integer" and "number" in self.kinds)

    def want_string_for(self, kind: Kind) -> bool:
        """Whether a value of this type is meant as a string."""
        return self.declare_string and not self.allow(kind)

    @property
    def declare_string(self) -> bool:
        return self.kinds is not None and "string" in self.kinds


class JsonReader:
    """Reads values from a scanner and gives them as strict JSON, piece by piece.

    Valid JSON passes through as it is, its spelling and blanks too, except for a value of a type that its schema does
    not allow while it allows another that is evidently meant: where a string is called for, a number, a boolean, a list
    or an object becomes the string of its text; a string becomes the value that its text is the JSON of.

    What is evident is mended: literals and escapes of Python, quotes ', bare keys and words, `=` for `:`, commas at the
    end of a list, control characters and quotes in strings, closing brackets that are missing where the model ended its
    answer. NaN and Infinity become null, or their name where a string is called for.

    All methods raise `NoCall` for what is no JSON even so, and where the text ends before a value does.

    Args:
        root: the schema that references in schemas refer to.
        raw_quote: marks both ends of strings in which nothing is escaped.
        stops: strings that close all brackets where they stand between values; they are not read.
        tuples: `(1, 2)` is a list.
    """

    def __init__(
        self,
        scanner: Scanner,
        root: Schema = True,
        *,
        raw_quote: str | None = None,
        stops: Iterable[str] = (),
        tuples: bool = False,
    ) -> None:
        self.scanner = scanner
        self.root = root
        self._raw_quote = raw_quote
        self._quotes = ('"""', '"', "'''", "'", *((raw_quote,) if raw_quote else ()))
        self._stops = tuple(stops)
        self._tuples = tuples
        self._read_ahead = ""  # blanks behind the last string

    def value(self, schema: Schema = True, depth: int = 0) -> Streaming[None]:
        """Read a value; the scanner stands at its first character."""
        if depth > _DEPTH:
            raise NoCall
        types = _Types.of(schema, self.root)
        begin = yield from self.scanner.peek(1)
        if begin == "{":
            yield from self._bracketed("object", self.object, schema, types, depth)
        elif begin == "[" or (begin == "(" and self._tuples):
            yield from self._bracketed("array", self._array, schema, types, depth)
        elif quote := (yield from self.scanner.accept(*self._quotes)):
            if types.allow("string"):
                yield from self._string(quote)
            else:
                text = yield from joined(self._string(quote))
                yield self._unquoted(text, schema, types, depth) or text
        else:
            yield _word((yield from self.scanner.run(_WORD)), types)

    def object(self, schema: Schema = True, depth: int = 0) -> Streaming[None]:
        """Read an object."""

        def member() -> Streaming[None]:
            key = yield from joined(self.key())
            yield key
            yield ":"
            if blanks := (yield from self.blanks()):
                yield blanks
            yield from self.value(member_of(schema, self.root, json.loads(key)), depth + 1)

        yield from self.scanner.expect("{")
        yield "{"
        yield from self._items("}", "}", member)

    def _array(self, schema: Schema, depth: int) -> Streaming[None]:
        items = items_of(schema, self.root)
        begin = yield from self.scanner.expect("[", "(")
        yield "["
        yield from self._items("]" if begin == "[" else ")", "]", lambda: self.value(items, depth + 1))

    def arguments(self, schema: Schema = True) -> Streaming[None]:
        """Read an object, or JSON of one that is written as a string; null or nothing in quotes is an empty one."""
        if (yield from self.scanner.peek(1)) == "{":
            yield from self.object(schema)
        elif quote := (yield from self.scanner.accept(*self._quotes)):
            text = yield from joined(self._string(quote, exact=True))
            if json.loads(text).strip():
                decoded = self._unquoted(text, schema, _Types(frozenset({"object"})))
                if decoded is None:
                    raise NoCall
                yield decoded
            else:
                yield "{}"
        elif _word((yield from self.scanner.run(_WORD)), _Types(None)) == "null":
            yield "{}"
        else:
            raise NoCall

    def key(self) -> Streaming[None]:
        """Read a name, quoted or bare, and what stands between it and its value but for the blanks after that."""
        if quote := (yield from self.scanner.accept(*self._quotes)):
            yield from self._string(quote)
        else:
            name = yield from self.scanner.run(_KEY)
            if not name:
                raise NoCall
            yield quoted(name)
        if blanks := (yield from self.blanks()):
            yield blanks
        yield from self.scanner.expect(":", "=")

    def string(self) -> Streaming[None]:
        """Read a string."""
        yield from self._string((yield from self.scanner.expect(*self._quotes)))

    def blanks(self) -> Waiting[str]:
        """Read blanks. Those that are none in JSON become spaces."""
        blanks = self._read_ahead + (yield from self.scanner.blanks())
        self._read_ahead = ""
        return _OTHER_BLANK.sub(" ", blanks)

    def closed(self, end: str) -> Waiting[bool]:
        """Read a closing bracket, if there is one or all are taken for closed."""
        if (yield from self.scanner.accept(end)) or (yield from self.scanner.ahead(*self._stops)):
            return True
        ended = yield from self.scanner.at_end()
        if ended:
            self.scanner.missing()
        return ended

    def more(self, end: str, *, begun: bool) -> Waiting[bool]:
        """Whether another item follows before a closing bracket; read what stands before either, and the bracket.

        Args:
            begun: an item has been read.
        """
        yield from self.blanks()
        comma = begun and (yield from self.scanner.accept(","))
        yield from self.blanks()
        if (yield from self.closed(end)):
            return False
        if begun and not comma:
            raise NoCall
        return True

    def _bracketed(
        self,
        kind: Kind,
        read: Callable[[Schema, int], Streaming[None]],
        schema: Schema,
        types: _Types,
        depth: int,
    ) -> Streaming[None]:
        if types.want_string_for(kind):
            yield quoted((yield from joined(read(True, depth))))
        else:
            yield from read(schema, depth)

    def _items(self, end: str, strict_end: str, item: Callable[[], Streaming[None]]) -> Streaming[None]:
        """Read what stands between two brackets, and the second."""
        comma, blanks = "", (yield from self.blanks())
        while not (yield from self.closed(end)):
            if comma or blanks:
                yield comma + blanks
            yield from item()
            before = yield from self.blanks()
            if (yield from self.scanner.accept(",")):
                comma, blanks = before + ",", (yield from self.blanks())
            elif (yield from self.closed(end)):
                comma, blanks = "", before
                break
            else:
                raise NoCall
        yield comma.removesuffix(",") + blanks + strict_end

    def _string(self, quote: str, *, exact: bool = False) -> Streaming[None]:
        """Read the rest of a string after its first quote.

        Args:
            exact: the next quote ends it, whatever stands behind.
        """
        exact = exact or len(quote) > 1
        yield '"'
        ends = (quote,) if quote == self._raw_quote else (quote, "\\")
        while True:
            if quote == '"' and (text := self.scanner.run_so_far(_STRICT_TEXT)):
                yield text
            end = yield from _mapped(self.scanner.stream_until(*ends), escape)
            if end is None:
                raise NoCall
            if end == "\\":
                yield (yield from self._escaped())
            elif exact or (yield from self._ends_here()):
                break
            else:
                yield escape(quote + self._read_ahead)
                self._read_ahead = ""
        yield '"'

    def _ends_here(self) -> Waiting[bool]:
        """Whether the quote just read ends a string, which it does where something stands behind it that may."""
        self._read_ahead = yield from self.scanner.blanks()
        following = yield from self.scanner.peek(1)
        if following in _AFTER_STRING or (yield from self.scanner.ahead(*self._stops)):
            return True
        if following in ('"', "'") and self._read_ahead:
            raise NoCall  # something between two strings is missing
        return False

    def _escaped(self) -> Waiting[str]:
        """Read what stands after a backslash."""
        character = yield from self.scanner.peek(1)
        if not character:
            raise NoCall
        yield from self.scanner.expect(character)
        if character in '"\\/bfnrt':
            return "\\" + character
        if character == "'":
            return character
        if digits := {"u": 4, "x": 2, "U": 8}.get(character):
            code = yield from self.scanner.peek(digits)
            if len(code) == digits and _HEX.fullmatch(code) and int(code, 16) <= 0x10FFFF:
                yield from self.scanner.expect(code)
                return "\\u" + code if character == "u" else escape(chr(int(code, 16)))
        return "\\\\" + escape(character)

    def _unquoted(self, text: str, schema: Schema, types: _Types, depth: int = 0) -> str | None:
        """What a JSON string is the JSON of, if that is of an allowed type."""

        def read(scanner: Scanner) -> Streaming[None]:
            reader = JsonReader(scanner, self.root, raw_quote=self._raw_quote, tuples=self._tuples)
            return reader.value(schema, depth + 1)

        try:
            value = _read_all(json.loads(text), read)
        except NoCall:
            return None
        return value if types.allow(_kind(value)) else None


def read_object(scanner: Scanner, tool: Tool, *, stops: Iterable[str] = ()) -> Reading[None]:
    """Read the arguments of a call of a tool, blanks before them too.

    Args:
        stops: see `JsonReader`.

    Raises:
        NoCall: they are no object.
    """
    yield from scanner.blanks()
    yield from as_arguments(JsonReader(scanner, tool.parameters, stops=stops).arguments(tool.parameters))


class Number(str):
    """A number as it is spelled: no digit of it is lost."""


def decoded(text: str) -> Any:
    """The value of strict JSON, with its numbers as they are spelled."""
    return json.loads(text, parse_int=Number, parse_float=Number)


def refuse_constant(constant: str) -> NoReturn:
    """For `json.loads(parse_constant=...)`: NaN and Infinity are no JSON."""
    raise ValueError(f"{constant} is no JSON")


def kind_of(text: str) -> Kind | None:
    """The type of a value by its JSON, without blanks around it; None where it is none."""
    try:
        json.loads(text, parse_int=Number, parse_float=Number, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return _kind(text)


def as_arguments(reading: Streaming[None]) -> Reading[None]:
    for piece in reading:
        yield None if piece is None else CallArguments(piece)


def typed_arguments(text: str, tool: Tool) -> str:
    """Arguments that were read before their tool was known. Raises `NoCall` where they are no object."""
    return _read_all(text, lambda scanner: JsonReader(scanner, tool.parameters).arguments(tool.parameters))


def joined(reading: Streaming[Any], limit: int | None = None) -> Waiting[str]:
    """All of a text, once it is complete.

    Args:
        limit: characters at most; more raise `NoCall`.
    """
    pieces = []
    length = 0
    for piece in reading:
        if piece is None:
            yield None
            continue
        pieces.append(piece)
        length += len(piece)
        if limit is not None and length > limit:
            raise NoCall
    return "".join(pieces)


def _read_all(text: str, read: Callable[[Scanner], Streaming[None]]) -> str:
    """What is read from a complete text. Raises `NoCall` where that is not all of it but for blanks."""
    text = text.strip()
    scanner = Scanner()
    scanner.feed(text)
    scanner.end("cut")
    value = "".join(piece for piece in read(scanner) if piece is not None)
    if scanner.position < len(text):
        raise NoCall
    return value


def quoted(text: str) -> str:
    """The JSON of a string."""
    return f'"{escape(text)}"'


def escape(text: str) -> str:
    """What stands for a text within a JSON string: only what has to be is escaped, and lone surrogates."""
    return _TO_ESCAPE.sub(lambda match: _escape_of(match.group()), text)


def _escape_of(character: str) -> str:
    return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _mapped(reading: Streaming[str | None], change: Callable[[str], str]) -> Streaming[str | None]:
    pieces = Returning(reading)
    for piece in pieces:
        yield None if piece is None else change(piece)
    return pieces.value


def _word(word: str, types: _Types) -> str:
    """The JSON of what is written without quotes or brackets."""
    if not word or len(word) > _NUMBER_LENGTH:
        raise NoCall
    if strict := _WORDS.get(word):
        return quoted(word) if strict != "null" and types.want_string_for("boolean") else strict
    if _NUMBER.fullmatch(word):
        return quoted(word) if types.want_string_for(_kind(word)) else word
    if word.lstrip("+-").lower() in _NO_NUMBERS:
        return quoted(word) if types.want_string_for("null") else "null"
    number = None if types.want_string_for("number") else _mended_number(word)
    if number:
        return number
    if types.declare_string and _BARE.fullmatch(word):
        return quoted(word)
    raise NoCall


def _mended_number(word: str) -> str | None:
    """The JSON of a number that is none in JSON, such as `+1`, `.5`, `007`, `1_000` or `0xff`."""
    match = _DECIMAL.fullmatch(word)
    if match and (match[2] or match[3]):
        sign, whole, fraction, exponent = (group or "" for group in match.groups())
        whole = whole.replace("_", "").lstrip("0") or "0"
        fraction = fraction.replace("_", "") or "0"
        return sign.replace("+", "") + whole + ("." + fraction if "." in word else "") + exponent
    try:
        return str(int(word, 0))
    except ValueError:
        return None


def _kind(value: str) -> Kind:
    """The type of a value by its JSON."""
    return _KINDS.get(value[0]) or ("number" if "." in value or "e" in value.lower() else "integer")
