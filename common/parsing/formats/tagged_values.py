"""What the formats that look like XML share: names and values between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from common.parsing.formats.base import NAME_LENGTH, Tools
from common.parsing.formats.tool_names import read_tool
from common.parsing.pieces import NoCall, Reading, Returning, Streaming, Waiting
from common.parsing.scanner import Scanner
from common.parsing.values import ArgumentsWriter

_PADDING: Final = re.compile(r"[\s\"']*")


class Ending(NamedTuple):
    """What ends a value: tags in this order, with one of `then` or the end of the text behind the last of them.

    Blanks may stand between. Where something else follows, the tags belong to the value.
    """

    tags: tuple[str, ...]
    then: tuple[str, ...]


def declared_name(scanner: Scanner, tools: Tools) -> Waiting[str]:
    """Read the name of a declared tool, and blanks and quotes around it. Raises `NoCall` where none stands here."""
    yield from scanner.run(_PADDING)
    tool = yield from read_tool(scanner, tools)
    yield from scanner.run(_PADDING)
    return tool.name


def read_key(scanner: Scanner, *ends: str, declared: Collection[str]) -> Waiting[tuple[str, str]]:
    """Read the name of a parameter, and which of the strings ends it.

    Blanks and quotes around it are layout, and what ends it does, unless a declared name has them.

    Raises:
        NoCall: nothing ends it.
    """
    key, closed = yield from scanner.until(*ends, limit=NAME_LENGTH)
    if closed is None:
        raise NoCall
    begun = key + closed
    rests = {name[len(begun) :] + end: end for name in declared if name.startswith(begun) for end in ends}
    if rests and (rest := (yield from scanner.accept(*rests))):
        closed = rests[rest]
        key = (begun + rest).removesuffix(closed)
    return key if key in declared else key.strip().strip("\"'"), closed


def read_value(
    scanner: Scanner,
    writer: ArgumentsWriter,
    endings: Sequence[Ending],
    *,
    written: Literal["spread", "tight", "exact", "text", "json"],
) -> Reading[str | None]:
    """Read the value of the last key, past the tags that close it. A string is written while it arrives.

    Args:
        written: how the model writes values: "spread" on lines of their own, so that a newline after the opening tag
            and one before the closing tag are layout; "tight", where one before the closing tag is layout only if one
            stands after the opening tag, too; "exact", where none is layout; "text" if this one is a string to the last
            blank, "json" if it is JSON.

    Returns:
        The first of the tags that closed it; None where the text has ended without any.

    Raises:
        NoCall: the text was cut before anything showed that the value is complete.
    """
    read = _text_until(scanner, endings)
    if written in ("spread", "tight") and ((yield from scanner.accept("\n")) or written == "spread"):
        read = _without_last_newline(read)
    text = Returning(read)
    streamed = written == "text"
    if streamed:
        yield writer.begin_text()
    held = ""
    for piece in text:
        if piece is None:
            yield None
        elif streamed:
            yield writer.text(piece)
        else:
            held += piece
            if written != "json" and writer.is_text(held):
                streamed = True
                yield writer.begin_text()
                yield writer.text(held)
    if streamed:
        yield writer.end_text()
    else:
        yield writer.json(held) if written == "json" else writer.value(held)
    return text.value


def check_forgotten(scanner: Scanner, *then: str) -> Waiting[None]:
    """Raise `NoCall` unless it shows that the model forgot the end of a call: another tag, or the end of its answer."""
    if not (yield from scanner.ahead(*then)):
        if not (yield from scanner.at_end()):
            raise NoCall
        scanner.missing()


def members(arguments: str) -> Iterator[tuple[str, str]]:
    """Names and values of a JSON object, the values as they are spelled."""
    decoder = json.JSONDecoder(parse_int=str)  # which has no limit of digits
    at = _skip(arguments, 0, " \t\n\r{")
    while arguments[at] != "}":
        name, end = decoder.raw_decode(arguments, at)
        start = _skip(arguments, end, " \t\n\r:")
        _, end = decoder.raw_decode(arguments, start)
        yield name, arguments[start:end]
        at = _skip(arguments, end, " \t\n\r,")


def bare(value: str) -> str:
    """The text of a JSON string, the JSON of other values."""
    text: str = json.loads(value) if value.startswith('"') else value
    return text


def tight(value: str) -> str:
    """A value as `read_value()` reads it where the model writes "tight"."""
    text = bare(value)
    return f"\n{text}\n" if text.startswith("\n") else text


def _text_until(scanner: Scanner, endings: Sequence[Ending]) -> Streaming[str | None]:
    by_tag = {ending.tags[0]: ending for ending in endings}
    while True:
        closing = yield from scanner.stream_until(*by_tag)
        if closing is None:
            scanner.missing()
            return None
        read = closing
        for tag in (*by_tag[closing].tags[1:], None):
            read += yield from scanner.blanks()
            if (yield from scanner.at_end()):
                scanner.missing()
                return closing
            if tag is None:
                if (yield from scanner.ahead(*by_tag[closing].then)):
                    return closing
            elif (yield from scanner.accept(tag)):
                read += tag
            else:
                break
        yield read


def _without_last_newline(text: Streaming[str | None]) -> Streaming[str | None]:
    held = ""
    whole = Returning(text)
    for piece in whole:
        if piece is None:
            yield None
            continue
        piece = held + piece
        held = "\n" if piece.endswith("\n") else ""
        if shown := piece.removesuffix(held):
            yield shown
    return whole.value


def _skip(text: str, at: int, characters: str) -> int:
    while text[at] in characters:
        at += 1
    return at
