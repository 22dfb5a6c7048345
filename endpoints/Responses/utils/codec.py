"""Events of an answer -> a response, as a whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

from loguru import logger

from common.errors import ContextLengthExceeded, InvalidRequest, ServerError
from common.generation import Event, Finish, FinishReason
from endpoints.blocks import Block, BlockDelta, BlockEnded, Blocks, BlockStarted
from endpoints.errors import openai_error, to_server_error
from endpoints.OAI.types import common
from endpoints.OAI.utils.chat import ReadAnswer
from endpoints.OAI.utils.generation import Tally
from endpoints.Responses.types.events import ResponseEvent, StreamEvent
from endpoints.Responses.types.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    Usage,
)
from endpoints.Responses.utils.output import ItemWriter, Output
from endpoints.streaming import IndexedEvents, Queued
from endpoints.wire import NamedEvent, Wire

Keep: TypeAlias = Callable[[ResponseObject], None]
_Ending: TypeAlias = Literal["response.completed", "response.incomplete", "response.failed"]

_EMPTY: Final = Block(0, "text")
# Codes by which agents know that they have to shorten the conversation, or that the same request has no other end.
_TOO_LONG: Final = ContextLengthExceeded.code
_REFUSED: Final = "invalid_prompt"


class ResponseCodec:
    """Renders the answer to one request.

    Args:
        response: as it is when it begins.
        reading: of the answer.
        output: makes items of blocks.
        keep: called with the response when it has ended, before the client gets it.
    """

    def __init__(self, response: ResponseObject, reading: ReadAnswer, output: Output, keep: Keep) -> None:
        self._response = response
        self._reading = reading
        self._output = output
        self._keep = keep
        self._blocks = Blocks()
        self._open: ItemWriter | None = None
        self._begun = 0  # items, those that were broken off included
        self._items: list[OutputItem] = []
        self._tally = Tally(1)
        self._queued = False

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        return self._reading.reader.finish_reason(finish)

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[NamedEvent]:
        number = 0
        async for event in self._events(answers):
            event.sequence_number = number
            number += 1
            yield _named(event)

    async def collect(self, answers: IndexedEvents) -> ResponseObject:
        async for _ in self._rendered(answers):
            pass
        return self._response

    async def _events(self, answers: IndexedEvents) -> AsyncIterator[StreamEvent]:
        yield ResponseEvent(type="response.created", response=self._response)
        yield ResponseEvent(type="response.in_progress", response=self._response)
        ending: _Ending
        try:
            async for event in self._rendered(answers):
                yield event
            ending = "response.completed" if self._response.status == "completed" else "response.incomplete"
        except Exception as error:
            told = to_server_error(error)
            logger.info("The response has failed: {}", told.message)
            self._end(failed(self._response, told))
            ending = "response.failed"
        yield ResponseEvent(type=ending, response=self._response)

    async def _rendered(self, answers: IndexedEvents) -> AsyncIterator[StreamEvent]:
        """The events of the items. After them the response has ended."""
        async for index, event in answers:
            self._tally.count(index, event)
            if isinstance(event, Queued):
                self._queued = True
                continue
            for part in self._reading.read(event):
                for rendered in self._part(part):
                    yield rendered

    def _part(self, event: Event) -> Iterator[StreamEvent]:
        cut = isinstance(event, Finish) and event.reason == "length"
        for change in self._blocks.read(event):
            match change:
                case BlockStarted(block):
                    yield from self._begin(block)
                case BlockDelta():
                    yield from self._opened.add(change)
                case BlockEnded(_, complete):
                    # A call that is broken off is none. Clients run what is done, so it never is.
                    if complete:
                        yield from self._close(cut=cut)
        if isinstance(event, Finish):
            if not self._items:  # clients expect something
                yield from self._begin(_EMPTY)
                yield from self._close(cut=cut)
            self._end(self._finished(cut=cut))

    @property
    def _opened(self) -> ItemWriter:
        assert self._open is not None
        return self._open

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        self._open = self._output.item(block, self._begun)
        self._begun += 1
        yield from self._open.begin()

    def _close(self, *, cut: bool) -> Iterator[StreamEvent]:
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        yield from self._opened.end(status)
        self._items.append(self._opened.item(status))

    def _finished(self, *, cut: bool) -> ResponseObject:
        return self._response.model_copy(
            update={
                "status": "incomplete" if cut else "completed",
                "incomplete_details": IncompleteDetails(reason="max_output_tokens") if cut else None,
                "completed_at": None if cut else int(time.time()),
            }
        )

    def _end(self, response: ResponseObject) -> None:
        update: dict[str, Any] = {"output": self._items}
        if self._queued:
            update["usage"] = _usage(self._tally.usage())
        self._response = response.model_copy(update=update)
        self._keep(self._response)


def failed(response: ResponseObject, error: ServerError) -> ResponseObject:
    refused = _REFUSED if isinstance(error, InvalidRequest) else ServerError.code
    code = error.code if error.code == _TOO_LONG else refused
    told = ResponseError(code=code, message=error.message)
    return response.model_copy(update={"status": "failed", "error": told})


def _usage(usage: common.Usage) -> Usage:
    cached = usage.prompt_tokens_details.cached_tokens
    return Usage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=usage.prompt_tokens - cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


class ResponseWire(Wire):
    """What goes wrong before there is anything of a response ends it too: agents take an `error` event for a broken
    connection, and send the same request again.

    Args:
        begin: makes the response as it is before anything of its answer is there.
    """

    def __init__(self, begin: Callable[[], ResponseObject]) -> None:
        super().__init__(openai_error)
        self._begin = begin

    def error(self, error: ServerError) -> NamedEvent:
        return _named(ResponseEvent(type="response.failed", response=failed(self._begin(), error), sequence_number=0))


def _named(event: StreamEvent) -> NamedEvent:
    return NamedEvent(event.type, event.model_dump_json(by_alias=True))
