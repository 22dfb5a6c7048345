"""Answers while they are generated: several side by side, as a stream of events, and given up with the client."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from loguru import logger
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from backends.client import EngineClient, Generation
from common.errors import ServerError
from common.generation import Event, Finish, FinishReason, GenerationRequest
from common.metrics import Metrics
from endpoints.admission import Place
from endpoints.answer_record import CANCELLED, AnswerRecord
from endpoints.errors import to_server_error
from endpoints.wire import Payload, Wire

T = TypeVar("T")

# In the OpenAPI document, beside the JSON of a route that may stream.
STREAMED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/event-stream": {}}}}


class Queued(NamedTuple):
    """The first event of every answer: the engine has taken the prompt."""

    prompt_tokens: int


# Of several answers, in the order in which they happen.
IndexedEvents: TypeAlias = AsyncIterable[tuple[int, Event | Queued]]
# How an answer has ended that has been read to its finish, as the client is told.
TellFinish: TypeAlias = Callable[[int, Finish], FinishReason]

# How long a stream's status line waits for the engine's verdict on the prompt. A refusal within it is a plain error
# response, a later one is an error inside the stream.
ACCEPT_SECONDS = 1.0


class Answers:
    """The answers to one request, generated side by side.

    Iterate for `(index, event)` pairs in the order in which the events happen. The iteration ends when every answer has
    finished; when one fails it raises that error. Leaving the context, or `close()`, cancels whatever still runs.

    Args:
        endpoint: path of the route that was asked, without a prefix.
        place: of the request in the queue.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[GenerationRequest],
        *,
        metrics: Metrics,
        endpoint: str,
        place: Place,
        finish_reason: TellFinish,
    ) -> None:
        self._client = client
        self._requests = requests
        self._finish_reason = finish_reason
        self._records = [AnswerRecord(metrics, endpoint, place.begin) for _ in requests]
        self._generations: list[Generation] = []
        self._queued: list[Queued] = []
        self._events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._opening = asyncio.create_task(self._open())
        self._failure: ServerError | None = None
        place.hand_over(self.fail)
        metrics.requests.labels(endpoint).inc()

    async def accepted(self) -> None:
        """Wait until the engine has accepted all prompts.

        Raises:
            ServerError: the engine refused a prompt, or there is no engine any more.
        """
        await asyncio.wait({self._opening})
        if self._failure is not None:
            raise self._failure
        self._opening.result()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event | Queued]]:
        await self.accepted()
        for index, queued in enumerate(self._queued):
            yield index, queued
        running = len(self._queued)
        while running:
            index, event = await self._events.get()
            if isinstance(event, Exception):
                self._end_all(event)
                raise event
            yield index, event
            if isinstance(event, Finish):
                running -= 1
                self._records[index].end(self._finish_reason(index, event))

    def fail(self, error: ServerError) -> None:
        """End the answers from outside: whoever waits for them gets the error. Harmless after their end."""
        self._failure = error
        self._end_all(error)
        self._opening.cancel()
        self._events.put_nowait((0, error))

    async def close(self) -> None:
        for index, record in enumerate(self._records):
            record.end(CANCELLED if record.finish is None else self._finish_reason(index, record.finish))
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        for generation in self._generations:
            await generation.cancel()

    async def _open(self) -> None:
        try:
            for index, request in enumerate(self._requests):
                generation = await self._client.generate(request)
                self._generations.append(generation)
                # From now on, so that events are measured when they come.
                generation.follow(partial(self._receive, index))
            for generation, record in zip(self._generations, self._records, strict=True):
                prompt_tokens = await generation.accepted()
                record.accepted(prompt_tokens)
                self._queued.append(Queued(prompt_tokens))
        except Exception as error:
            self._end_all(error)
            raise

    def _receive(self, index: int, event: Event | ServerError) -> None:
        if not isinstance(event, ServerError):
            self._records[index].received(event)
        self._events.put_nowait((index, event))

    def _end_all(self, error: Exception) -> None:
        for record in self._records:
            record.end(error.code if isinstance(error, ServerError) else ServerError.code)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it has gone; nobody reads the response any more.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            logger.info("The client has gone; its request is cancelled")
            raise ClientDisconnect
        return task.result()
    finally:
        for child in (task, watcher):
            child.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Events that always end with an error or what the API calls a finish, then with its terminator.

    Args:
        payloads: one for each event.
        wire: how the API writes them.
        ping: seconds between signs of life; 0 for none.
        headers: beside those that a stream needs.
        cleanup: called when the stream has ended, for whatever reason, even if it never began.
    """

    def __init__(
        self,
        payloads: AsyncIterator[Payload],
        *,
        wire: Wire,
        ping: int,
        headers: Mapping[str, str] | None = None,
        cleanup: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(
            self._frames(payloads, wire),
            media_type=wire.media_type,
            ping=ping if wire.pings else 0,
            ping_message_factory=wire.ping,
            headers=headers,
            client_close_handler_callable=self._log_disconnect,
        )
        self._cleanup = cleanup
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._cleanup is not None:
                await self._cleanup()

    async def _frames(self, payloads: AsyncIterator[Payload], wire: Wire) -> AsyncIterator[bytes]:
        try:
            async for payload in payloads:
                yield wire.frame(payload)
        except Exception as error:
            told = to_server_error(error)
            logger.info("The stream ends with an error: {}", told.message)
            yield wire.frame(wire.error(told))
        self._complete = True
        if wire.terminator is not None:
            yield wire.frame(wire.terminator)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # sse-starlette's opens a cancel scope for each event, though there is no limit: connections have theirs.
        await send(message)

    async def _log_disconnect(self, message: Message) -> None:
        # Many clients close the connection as soon as they read the terminator.
        if not self._complete:
            logger.info("The client has gone before the end of its stream")


async def start_early(payloads: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """The same payloads, of which the first is already being made: an error that comes soon is raised here."""
    first = asyncio.create_task(anext(payloads, None))
    done, _ = await asyncio.wait({first}, timeout=ACCEPT_SECONDS)
    if done:
        first.result()
    return _resume(first, payloads)


async def _resume(first: asyncio.Task[str | None], payloads: AsyncGenerator[str]) -> AsyncGenerator[str]:
    payload = await first
    while payload is not None:
        yield payload
        payload = await anext(payloads, None)
