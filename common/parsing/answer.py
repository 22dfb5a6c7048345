"""The text of one answer, fed as it is generated -> its pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.pieces import CallArguments, Content, Piece, Thinking, Thought
from common.parsing.scanner import Scanner


class AnswerParser:
    """Feed text, get pieces, end. The pieces joined do not depend on how the text was cut.

    Attributes:
        thinking: whether the text so far ends inside a thought. What may become a mark does not count yet.
    """

    def __init__(self, dialect: Dialect, options: ReadOptions) -> None:
        self.thinking = False
        self._scanner = Scanner()
        self._reading = dialect.read(self._scanner, options)
        self._read()  # up to where it waits for text

    def feed(self, text: str) -> list[Piece]:
        self._scanner.feed(text)
        return self._read()

    def end(self, ending: Literal["complete", "cut"]) -> list[Piece]:
        self._scanner.end(ending)
        return self._read()

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._reading:
            if piece is None:
                break
            if isinstance(piece, Thinking):
                self.thinking = piece.now
            else:
                pieces.append(piece)
        return joined(pieces) if len(pieces) > 1 else pieces


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """With neighbours of a kind as one. Contents are neighbours only if nothing stands between them in the answer."""
    result: list[Piece] = []
    run: list[Content | Thought | CallArguments] = []
    end = 0  # of the content in `run`
    for piece in pieces:
        if run and (type(piece) is not type(run[0]) or (isinstance(piece, Content) and piece.start != end)):
            result.append(_as_one(run))
            run = []
        if isinstance(piece, Content | Thought | CallArguments):
            run.append(piece)
        else:
            result.append(piece)
        if isinstance(piece, Content):
            end = piece.start + len(piece.text)
    if run:
        result.append(_as_one(run))
    return result


def _as_one(run: list[Content | Thought | CallArguments]) -> Piece:
    return run[0] if len(run) == 1 else run[0]._replace(text="".join(piece.text for piece in run))
