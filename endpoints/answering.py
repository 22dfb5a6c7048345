"""From a request to its response, whatever the API: the model, what it is asked for, and the answers as a whole or as a
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import msgspec
from fastapi import Request, Response
from loguru import logger

from backends.client import EngineClient
from common.errors import ServerError
from common.generation import Finish, FinishReason, GenerationRequest
from endpoints.admission import place_of
from endpoints.OAI.types.common import GenerationFields
from endpoints.request_log import record_generations
from endpoints.state import ServerState
from endpoints.streaming import ACCEPT_SECONDS, Answers, EventStream, IndexedEvents
from endpoints.wire import OPENAI, Payload, Wire

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Names the samplers that a request turns on and the engine lacks.
IGNORED_HEADER: Final = "X-Ignored-Parameters"


class Renderer(Protocol[T_co]):
    """What renders the answers to one request, for any API."""

    def stream(self, answers: IndexedEvents) -> AsyncIterator[Payload]:
        """What each event of a stream says, the terminator left out."""

    async def collect(self, answers: IndexedEvents) -> T_co:
        """The whole response."""

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        """How an answer that was read to its finish has ended, as the server counts it."""


@dataclass(frozen=True)
class Asked(Generic[T]):
    """What a request asks of a model.

    Attributes:
        generations: one for each answer.
        codec: of the answers.
        fields: of the request, with the presets in force.
    """

    generations: Sequence[GenerationRequest]
    codec: Renderer[T]
    fields: GenerationFields


Ask: TypeAlias = Callable[[EngineClient], Awaitable[Asked[T]]]


async def respond(
    request: Request,
    response: Response,
    state: ServerState,
    model: str | None,
    ask: Ask[T],
    *,
    stream: bool,
    wire: Wire = OPENAI,
    ping: int | None = None,
    keep_alive: float | None = None,
) -> T | EventStream:
    """The answers to a request, as a whole or as a stream.

    A stream begins with what keeps it alive where the model has to be loaded first, or other requests come before.

    Args:
        request: of a `QueuedRoute`.
        response: gets the headers of an answer that is not streamed.
        model: that the request names; see `ServerState.serving()`, also for `keep_alive`.
        ask: what the model is to be asked for.
        wire: how the API writes streams.
        ping: seconds between the pings of a stream, where the request says; none for 0 and below.

    Raises:
        ServerError: the request cannot be served, in a stream as far as that is known at once, or nearly so.
    """
    opening = _Opening(request, state, partial(state.serving, request, model, keep_alive=keep_alive), ask)
    if stream and not state.settings.developer.disable_request_streaming:
        try:
            await opening.opened(ACCEPT_SECONDS)
        except BaseException:
            await opening.close()
            raise
        return EventStream(
            opening.payloads(),
            wire=wire,
            ping=state.settings.network.sse_ping_interval if ping is None else max(0, ping),
            headers=opening.headers,
            cleanup=opening.close,
        )
    try:
        whole = await opening.whole()
    finally:
        await opening.close()
    response.headers.update(opening.headers)
    return whole


def asked_by(
    request: Request, fields: GenerationFields, generations: Iterable[GenerationRequest]
) -> list[GenerationRequest]:
    """The requests of a front end, each with whose it is and whether to explain what was cached of it."""
    return [
        msgspec.structs.replace(generation, owner=request.state.owner, explain_cache=fields.explain_cache)
        for generation in generations
    ]


class _Opening(Generic[T]):
    """The way of a request to its answers, which it may leave at any time.

    Attributes:
        headers: of the response, as far as they are known.
    """

    def __init__(
        self, request: Request, state: ServerState, serving: Callable[[], Awaitable[EngineClient]], ask: Ask[T]
    ) -> None:
        self.headers: dict[str, str] = {}
        self._request = request
        self._state = state
        self._answers: Answers | None = None
        self._failure: ServerError | None = None
        self._task = asyncio.create_task(self._open(serving, ask))
        place_of(request).hand_over(self._fail)

    async def opened(self, patience: float | None = None) -> None:
        """Wait until the engine has accepted all prompts, or the patience is at its end.

        Args:
            patience: seconds to wait at most; None for as long as it takes.

        Raises:
            ServerError: the request cannot be served.
        """
        done, _ = await asyncio.wait({self._task}, timeout=patience)
        if self._failure is not None:
            raise self._failure
        if done:
            self._task.result()

    async def payloads(self) -> AsyncIterator[Payload]:
        await self.opened()
        answers, codec = self._task.result()
        async for payload in codec.stream(answers):
            yield payload

    async def whole(self) -> T:
        await self.opened()
        answers, codec = self._task.result()
        return await codec.collect(answers)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._answers is not None:
            await self._answers.close()

    async def _open(self, serving: Callable[[], Awaitable[EngineClient]], ask: Ask[T]) -> tuple[Answers, Renderer[T]]:
        request, state = self._request, self._state
        client = await serving()
        asked = await ask(client)
        if ignored := ", ".join(asked.fields.without_effect()):
            logger.info("The engine has no sampler for {}; the request goes on without", ignored)
            self.headers[IGNORED_HEADER] = ignored
        generations = asked_by(request, asked.fields, asked.generations)
        await record_generations(request, state.settings.logging, generations)
        self._answers = Answers(
            client,
            generations,
            metrics=state.metrics,
            endpoint=request.scope["route"].path,
            place=place_of(request),
            finish_reason=asked.codec.finish_reason,
        )
        await self._answers.accepted()
        return self._answers, asked.codec

    def _fail(self, error: ServerError) -> None:
        """End the way from outside. Answers that there are by then are ended by themselves."""
        self._failure = error
        self._task.cancel()
