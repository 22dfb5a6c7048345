"""Events -> answers as Ollama gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar

from common.generation import (
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    SampledLogprob,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from common.generation import TokenLogprob as EngineLogprob
from common.json_body import read_json
from endpoints.Ollama.types.response import (
    Answer,
    Call,
    CalledFunction,
    ChatAnswer,
    GenerateAnswer,
    Logprob,
    Message,
    TokenLogprob,
)
from endpoints.streaming import IndexedEvents, Queued

A = TypeVar("A", bound=Answer)

ReadEvent: TypeAlias = Callable[[Event], Iterator[Event]]

_NANOSECONDS = 1_000_000_000


def as_they_are(event: Event) -> Iterator[Event]:
    """Reads the events of a text completion."""
    yield event


class Stopwatch:
    """How long a request takes.

    Attributes:
        load_duration: nanoseconds until its model was there.
    """

    def __init__(self) -> None:
        self._started = perf_counter()
        self.load_duration = 0

    def loaded(self) -> None:
        self.load_duration = self.total_duration

    @property
    def total_duration(self) -> int:
        """Nanoseconds so far."""
        return _nanoseconds(perf_counter() - self._started)


@dataclass
class _Piece:
    """What an event adds to an answer, or all of them have."""

    content: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, other: _Piece) -> None:
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


class OllamaCodec(ABC, Generic[A]):
    """Renders the answer to one request.

    Args:
        model: its name, as the client is told.
        read: tells thoughts and calls apart in the engine's events.
        alternatives: to report for each token; None for no log-probabilities.
    """

    def __init__(self, model: str, read: ReadEvent, stopwatch: Stopwatch, alternatives: int | None) -> None:
        self._model = model
        self._read = read
        self._stopwatch = stopwatch
        self._alternatives = alternatives
        self._finish_reason: FinishReason = "stop"
        self._open_call = _OpenCall("", "")
        self._calls = 0  # complete ones

    @abstractmethod
    def answer(self, piece: _Piece, **ending: Any) -> A:
        """
        Args:
            ending: members of the last one.
        """

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        """One JSON text for each line."""
        async for part in self._parts(answers):
            yield self._rendered(part).model_dump_json()

    async def collect(self, answers: IndexedEvents) -> A:
        whole = _Piece()
        ending: dict[str, Any] = {}
        async for part in self._parts(answers):
            if isinstance(part, Finish):
                ending = self._ending(part)
            else:
                whole.add(part)
        return self.answer(whole, **ending)

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        return self._finish_reason

    async def _parts(self, answers: IndexedEvents) -> AsyncIterator[_Piece | Finish]:
        async for _, event in answers:
            if isinstance(event, Queued):
                continue
            for part in self._read(event):
                if isinstance(part, Finish):
                    self._finish_reason = part.reason
                    yield part
                elif (piece := self._piece(part)) is not None:
                    yield piece

    def _rendered(self, part: _Piece | Finish) -> A:
        return self.answer(_Piece(), **self._ending(part)) if isinstance(part, Finish) else self.answer(part)

    def _piece(self, event: Event) -> _Piece | None:
        match event:
            case TextDelta(text, _, logprobs) if text or logprobs:
                return _Piece(content=text, logprobs=self._logprobs(logprobs))
            case ReasoningDelta(text):
                return _Piece(thinking=text)
            case ToolCallDelta(_, id, name, arguments):
                if id is not None:
                    self._open_call = _OpenCall(id, name or "")
                self._open_call.arguments.append(arguments)
            case ToolCallEnd(complete=True):
                self._calls += 1
                return _Piece(calls=[self._open_call.whole(self._calls - 1)])
        return None

    def _logprobs(self, logprobs: Sequence[SampledLogprob]) -> list[Logprob]:
        if self._alternatives is None:
            return []
        return [
            Logprob(
                **_token(entry).model_dump(), top_logprobs=[_token(other) for other in entry.top[: self._alternatives]]
            )
            for entry in logprobs
        ]

    def _ending(self, finish: Finish) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": self._stopwatch.total_duration,
            "load_duration": self._stopwatch.load_duration,
            **_counts(finish.usage),
        }


class ChatCodec(OllamaCodec[ChatAnswer]):
    def answer(self, piece: _Piece, **ending: Any) -> ChatAnswer:
        message = Message(content=piece.content, thinking=piece.thinking or None, tool_calls=piece.calls or None)
        return ChatAnswer(model=self._model, message=message, logprobs=piece.logprobs or None, **ending)


class GenerateCodec(OllamaCodec[GenerateAnswer]):
    def answer(self, piece: _Piece, **ending: Any) -> GenerateAnswer:
        return GenerateAnswer(
            model=self._model,
            response=piece.content,
            thinking=piece.thinking or None,
            tool_calls=piece.calls or None,
            logprobs=piece.logprobs or None,
            **ending,
        )


@dataclass
class _OpenCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def whole(self, index: int) -> Call:
        function = CalledFunction(index=index, name=self.name, arguments=read_json("".join(self.arguments).encode()))
        return Call(id=self.id, function=function)


def _token(entry: EngineLogprob) -> TokenLogprob:
    return TokenLogprob(token=entry.token, logprob=entry.logprob, bytes=list(entry.raw))


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(usage.prompt_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(usage.completion_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)
