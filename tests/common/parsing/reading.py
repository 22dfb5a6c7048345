"""Reads with a single generator of the parser, outside of any dialect that would catch its defects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from hypothesis import strategies as st

from common.parsing.formats.base import Tool, ToolFormat, Tools
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, NoCall, Piece
from common.parsing.scanner import Scanner
from tests.common.parsing.answers import cut

Ending: TypeAlias = Literal["complete", "cut"]

# What may confuse those who read JSON.
_FRAGMENTS: Final = (
    *('"', "'", '"""', "\\", '\\"', "\\u00e9", "\\ud83d", "{", "}", "[", "]", "(", ")", ",", ":", "=", ";", "```"),
    *("null", "None", "true", "NaN", "-1", "1.0", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "[ARGS]"),
    *("[TOOL_CALLS]", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "<|python_end|>", " ", "\n", "\t", "\x00", "\u2028"),
    *("\x85", "é", "😀", "a"),
)
texts: Final = st.lists(st.sampled_from(_FRAGMENTS), max_size=6).map("".join) | st.text(max_size=8)
values: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


class Result(NamedTuple):
    """What was read, and what has happened then."""

    pieces: list[Any]
    failed: bool
    position: int


def read_all(
    read: Callable[[Scanner], Iterator[Any]],
    text: str,
    sizes: Sequence[int] = (1,),
    ending: Ending = "complete",
) -> Result:
    """
    Args:
        sizes: of the chunks, used again and again.
    """
    scanner = Scanner()
    reading = read(scanner)
    pieces: list[Any] = []
    for chunk in (*cut(text, sizes), None):
        if chunk is None:
            scanner.end(ending)
        else:
            scanner.feed(chunk)
        try:
            while (piece := next(reading)) is not None:
                pieces.append(piece)
        except StopIteration:
            return Result(pieces, False, scanner.position)
        except NoCall:
            return Result(pieces, True, scanner.position)
    raise AssertionError("it waits for more than there is")


class Read(NamedTuple):
    """What a format has read: name, id and arguments of complete calls, and names of those that broke off."""

    calls: list[tuple[str, str | None, str]]
    broken: list[str]
    failed: bool


def read_block(
    format: ToolFormat, text: str, tools: Tools, sizes: Sequence[int] = (1,), ending: Ending = "complete"
) -> Read:
    result = read_all(lambda scanner: format.read(scanner, tools), text, sizes, ending)
    return Read(*_calls_in(result.pieces), result.failed)


def _calls_in(pieces: Sequence[Piece]) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    calls = []
    begun: CallBegin | None = None
    arguments = ""
    for piece in pieces:
        match piece:
            case CallBegin():
                assert begun is None
                begun, arguments = piece, ""
            case CallArguments():
                assert begun is not None
                arguments += piece.text
            case CallEnd(complete=True):
                assert begun is not None
                calls.append((begun.name, begun.id, arguments))
                begun = None
            case _:
                raise AssertionError(piece)
    return calls, [begun.name] if begun else []


def strict(text: str) -> Any:
    """The value of JSON. NaN is none, and text that cannot be sent is none."""
    text.encode()
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """A text with parts of it removed, doubled or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 6)))
        text = text[:start] + draw(texts | st.just(text[start:end] * 2)) + text[end:]
    return text


LS: Final = Tool("ls", {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}})
NOW: Final = Tool("get-now.utc", {})
FREE: Final = Tool("free", {})
TOOLS: Final = Tools([LS, NOW, FREE])
