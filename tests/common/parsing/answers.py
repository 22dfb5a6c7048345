"""Reads whole answers in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from hypothesis import strategies as st

from common.parsing.answer import AnswerParser, joined
from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.formats.base import Call, Tool, Tools
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Thought

NO_TOOLS = ReadOptions()
TOOLS = Tools(
    [
        Tool("ls", {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}),
        Tool("get_goal", {}),
    ]
)
WITH_TOOLS = ReadOptions(TOOLS)

# Sizes of chunks, used again and again.
chunk_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def texts_of(fragments: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts made of fragments, of their halves, and of what may stand between them."""
    halves = [fragment[:3] for fragment in fragments] + [fragment[3:] for fragment in fragments]
    return st.lists(st.sampled_from([*fragments, *halves, " ", "\n", "a", "`", '"', "<", "é"]), max_size=25).map(
        "".join
    )


def cut(text: str, sizes: Iterable[int]) -> Iterator[str]:
    remaining = itertools.cycle(sizes)
    while text:
        size = next(remaining)
        yield text[:size]
        text = text[size:]


def read(
    dialect: Dialect,
    text: str,
    options: ReadOptions = WITH_TOOLS,
    *,
    sizes: Sequence[int] = (1,),
    ending: Literal["complete", "cut"] = "complete",
) -> list[Piece]:
    parser = AnswerParser(dialect, options)
    pieces = [piece for chunk in cut(text, sizes) for piece in parser.feed(chunk)]
    return joined([*pieces, *parser.end(ending)])


def content_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def thoughts_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Thought))


def calls_of(pieces: Iterable[Piece]) -> list[Call]:
    """Those that are complete."""
    calls = []
    name = arguments = ""
    for piece in pieces:
        match piece:
            case CallBegin():
                name, arguments = piece.name, ""
            case CallArguments():
                arguments += piece.text
            case CallEnd(complete=True):
                calls.append(Call(name, arguments))
    return calls


def check_contents(text: str, pieces: Iterable[Piece]) -> None:
    """Contents stand where they say, in order, and none twice."""
    end = 0
    for piece in pieces:
        if isinstance(piece, Content):
            assert piece.text == text[piece.start :][: len(piece.text)]
            assert piece.text
            assert piece.start >= end
            end = piece.start + len(piece.text)


def check_answer(dialect: Dialect, text: str, options: ReadOptions, expected: tuple[str, str, list[Call]]) -> None:
    """Thoughts, content and complete calls of an answer are as expected, however it is cut."""
    for sizes in ((1,), (2,), (3, 5), (len(text) or 1,)):
        pieces = read(dialect, text, options, sizes=sizes)
        assert (thoughts_of(pieces), content_of(pieces), calls_of(pieces)) == expected
