"""A stream of the engine's events -> the same with thoughts and calls told apart."""

from __future__ import annotations

import codecs
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from common.generation import (
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    SampledLogprob,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
)
from common.parsing.answer import AnswerParser
from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.formats.base import Call
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Thought

# Ends that are no decision of the model's, although the engine calls them a stop.
_CUTS = frozenset({"stop_string", "loop_detected"})


class AnswerReader:
    """Reads the events of one answer.

    Log-probabilities stay with the text for the user: an entry for each token that has a part in it, in the TextDelta
    with that part. An answer with a complete call that the model ended itself finishes with the reason "tool_calls".

    Attributes:
        calls: those that are complete, with their ids.
    """

    def __init__(self, dialect: Dialect, options: ReadOptions) -> None:
        self.calls: list[Call] = []
        self._parser = AnswerParser(dialect, options)
        self._text: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []  # of the engine's events since the last TextDelta
        self._logprobs = _Logprobs()
        self._ids: list[str] = []  # of all calls that have begun; the last may be open
        self._name = ""
        self._arguments: list[str] = []

    @property
    def text(self) -> str:
        """All that the model gave, marks and all."""
        return "".join(self._text)

    @property
    def content(self) -> str:
        """What of it is for the user."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """Its thoughts."""
        return "".join(self._reasoning)

    def finish_reason(self, finish: Finish) -> FinishReason:
        """What the client of an answer that has been read is told, where the engine has ended it so."""
        return "tool_calls" if self.calls and finish.reason == "stop" else finish.reason

    def read(self, event: Event) -> Iterator[Event]:
        """What an event of the engine's becomes. After a `Finish` nothing is read any more."""
        match event:
            case TextDelta():
                self._text.append(event.text)
                self._token_ids += event.token_ids
                self._logprobs.add(event)
                yield from self._events(self._parser.feed(event.text))
            case Finish():
                ended_itself = event.reason == "stop" and event.eos_reason not in _CUTS
                yield from self._events(self._parser.end("complete" if ended_itself else "cut"))
                yield msgspec.structs.replace(event, reason=self.finish_reason(event))
            case _:
                yield event

    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            match piece:
                case Content(text, start):
                    self._content.append(text)
                    token_ids, self._token_ids = self._token_ids, []
                    yield TextDelta(text, token_ids, self._logprobs.take(start, start + len(text)))
                case Thought(text):
                    self._reasoning.append(text)
                    yield ReasoningDelta(text)
                case CallBegin(name, id):
                    self._name, self._arguments = name, []
                    self._ids.append(self._unique(id))
                    yield ToolCallDelta(self._index, self._ids[-1], name)
                case CallArguments(text):
                    self._arguments.append(text)
                    yield ToolCallDelta(self._index, arguments=text)
                case CallEnd(complete):
                    if complete:
                        self.calls.append(Call(self._name, "".join(self._arguments), self._ids[-1]))
                    yield ToolCallEnd(self._index, complete)

    @property
    def _index(self) -> int:
        return len(self._ids) - 1

    def _unique(self, id: str | None) -> str:
        return id if id and id not in self._ids else f"call_{secrets.token_hex(12)}"


class _Entry(NamedTuple):
    """A log-probability and the characters of the answer that its token has a part in."""

    start: int
    end: int
    logprob: SampledLogprob


class _Logprobs:
    """Log-probabilities that wait for their text, which may be held back."""

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0  # of the text so far

    def add(self, delta: TextDelta) -> None:
        characters = self._characters
        for entry in delta.logprobs:
            start = characters
            characters += len(self._decoder.decode(entry.raw))
            unfinished = bool(self._decoder.getstate()[0])
            self._waiting.append(_Entry(start, max(characters + unfinished, start + 1), entry))
        if delta.text or not self._decoder.getstate()[0]:  # then it has no half of one
            self._characters += len(delta.text)
            self._decoder.reset()

    def take(self, start: int, end: int) -> list[SampledLogprob]:
        """Those of tokens that have a part in the characters [start, end). Those before them are no longer wanted."""
        taken = []
        while self._waiting and self._waiting[0].start < end:
            entry = self._waiting.popleft()
            if entry.end > start:
                taken.append(entry.logprob)
        return taken
