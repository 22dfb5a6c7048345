"""What a text is made of."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Y = TypeVar("Y")
R = TypeVar("R")


class Content(NamedTuple):
    """Text for the user, as the model wrote it."""

    text: str
    start: int  # characters of the answer before it


class Thought(NamedTuple):
    text: str


class Thinking(NamedTuple):
    """From here on the text belongs to a thought, or no longer. No part of the answer: `AnswerParser` keeps it."""

    now: bool


class CallBegin(NamedTuple):
    """The name of a call is known, and that of a declared tool."""

    name: str
    id: str | None = None  # where the model gives one


class CallArguments(NamedTuple):
    """More of the arguments of the call that has begun; all joined, they are the JSON of an object."""

    text: str


class CallEnd(NamedTuple):
    """The call that has begun is complete, or else it is none: its text then follows as `Content`."""

    complete: bool = True


Piece: TypeAlias = Content | Thought | Thinking | CallBegin | CallArguments | CallEnd

# A generator that reads from a `Scanner`: it yields pieces, and None whenever it needs more text.
Reading: TypeAlias = Generator[Piece | None, None, R]
# One that yields nothing but None: a primitive of the scanner.
Waiting: TypeAlias = Generator[None, None, R]
# One that yields text as it comes, and None.
Streaming: TypeAlias = Generator[str | None, None, R]


class Returning(Generic[Y, R]):
    """A generator to iterate over that keeps what it returns.

    Attributes:
        value: set once the iteration has ended.
    """

    def __init__(self, reading: Generator[Y, None, R]) -> None:
        self.value: R
        self._reading = reading

    def __iter__(self) -> Iterator[Y]:
        self.value = yield from self._reading


class NoCall(Exception):
    """What was taken for a call is none, or breaks off: its text is content."""
