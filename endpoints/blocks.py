"""Events of an answer -> its blocks, for APIs that number these and say where each begins and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from common.generation import (
    Event,
    Finish,
    ReasoningDelta,
    SampledLogprob,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
)

BlockKind: TypeAlias = Literal["thought", "text", "call"]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of one kind.

    Attributes:
        index: of the block in the answer; each call is a block of its own.
        call_id: of a call.
        name: of what is called.
    """

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""


class BlockStarted(NamedTuple):
    block: Block


class BlockDelta(NamedTuple):
    """A piece of the open block.

    Attributes:
        text: never empty. Of a call: of its arguments, which joined are JSON of an object.
        logprobs: of the tokens with a part in a text, where the request asked for them.
    """

    block: Block
    text: str
    logprobs: Sequence[SampledLogprob] = ()


class BlockEnded(NamedTuple):
    """No more of the open block.

    Attributes:
        complete: false only for a call that is broken off and so none: its text follows as a block of text.
    """

    block: Block
    complete: bool = True


BlockEvent: TypeAlias = BlockStarted | BlockDelta | BlockEnded


class Blocks:
    """The blocks of one answer, of which one is open at a time. None is without text, but for calls."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._count = 0

    def read(self, event: Event) -> Iterator[BlockEvent]:
        """What an event adds; one that carries nothing of the answer, as a Prefill does, adds nothing.

        Args:
            event: with thoughts and calls told apart, as `common.parsing.events.AnswerReader` gives it.
        """
        match event:
            case TextDelta(text, _, logprobs) if text:
                yield from self._piece("text", text, logprobs or ())
            case ReasoningDelta(text) if text:
                yield from self._piece("thought", text)
            case ToolCallDelta(_, id, name, arguments):
                if id is not None:
                    yield from self._begin("call", id, name or "")
                if arguments:
                    yield from self._piece("call", arguments)
            case ToolCallEnd(_, complete):
                yield from self._end(complete=complete)
            case Finish():
                yield from self._end()

    def _piece(self, kind: BlockKind, text: str, logprobs: Sequence[SampledLogprob] = ()) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        yield BlockDelta(self._open, text, logprobs)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = Block(self._count, kind, call_id, name)
        self._count += 1
        yield BlockStarted(self._open)

    def _end(self, *, complete: bool = True) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEnded(self._open, complete)
            self._open = None
