"""What both generating routes share: fields -> generation requests, finished answers -> usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2s
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from fastapi import Request
from loguru import logger
from pydantic import BaseModel

from backends.client import EngineClient
from backends.messages import ModelInfo
from common.errors import Unsupported
from common.generation import Finish, GenerationRequest, SampledLogprob, TextDelta, TextSpan
from endpoints.errors import openai_error
from endpoints.OAI.types.common import Envelope, GenerationFields, PromptTokensDetails, Usage
from endpoints.request_log import record_generations
from endpoints.state import ServerState
from endpoints.streaming import Answers, EventStream, IndexedEvents, stream_answers, unless_disconnected

R = TypeVar("R", bound=BaseModel, covariant=True)


class Codec(Protocol[R]):
    """Renders the answers to one request as its API wants them."""

    def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        """One JSON text for each server-sent event, the terminator left out."""

    async def collect(self, answers: IndexedEvents) -> R: ...


async def respond(
    request: Request,
    state: ServerState,
    client: EngineClient,
    generations: Sequence[GenerationRequest],
    codec: Codec[R],
    *,
    stream: bool,
) -> R | EventStream:
    """Generate, and give up when the client goes away."""
    await record_generations(request, state.settings.logging, generations)
    answers = Answers(client, generations)
    if stream and not state.settings.developer.disable_request_streaming:
        ping = state.settings.network.sse_ping_interval
        return await stream_answers(answers, codec.stream, render_error=openai_error, ping=ping)
    async with answers:
        return await unless_disconnected(request, codec.collect(answers))


def generation_requests(
    prompt: str | list[int],
    fields: GenerationFields,
    *,
    logprobs: int | None,
    add_bos: bool | None = None,
    literals: Sequence[TextSpan] = (),
    stop_strings: Sequence[str] = (),
) -> list[GenerationRequest]:
    """`n` requests for one prompt. With a seed each gets one of its own, else all answers would be the same.

    Raises:
        InvalidRequest: fields contradict each other, or ask for output that cannot be constrained so.
    """
    _refuse_constraints(fields)
    if ignored := fields.without_effect():
        logger.info("The engine has no sampler for {}; the request goes on without", ", ".join(ignored))
    request = GenerationRequest(
        prompt=prompt,
        sampling=fields.parameters(),
        add_bos=add_bos,
        literals=list(literals),
        stop_strings=[*fields.stop_strings, *stop_strings],
        stop_tokens=fields.stop_tokens,
        max_tokens=max(0, fields.max_tokens),
        min_tokens=fields.min_tokens,
        seed=fields.seed,
        banned_strings=fields.banned_strings,
        token_healing=fields.token_healing,
        logprobs=logprobs,
    )
    if fields.seed is None:
        return [request] * fields.n
    return [msgspec.structs.replace(request, seed=fields.seed + index) for index in range(fields.n)]


def _refuse_constraints(fields: GenerationFields) -> None:
    if fields.response_format.type != "text":
        _refuse("response_format.type", repr(fields.response_format.type))
    for name in ("json_schema", "regex_pattern", "grammar_string"):
        if getattr(fields, name):
            _refuse(name, "set")


def _refuse(param: str, value: str) -> None:
    raise Unsupported(
        f"{param} is {value}, but output cannot be constrained yet, and an answer that only looks as if it were would "
        "help nobody. Leave the field out.",
        param=param,
    )


class WholeAnswers(NamedTuple):
    """All answers to a request, by index."""

    texts: list[str]
    logprobs: list[list[SampledLogprob]]
    finishes: dict[int, Finish]


async def collect(answers: IndexedEvents, count: int) -> WholeAnswers:
    """Wait for the end of `count` answers."""
    whole = WholeAnswers([""] * count, [[] for _ in range(count)], {})
    async for index, event in answers:
        if isinstance(event, TextDelta):
            whole.texts[index] += event.text
            whole.logprobs[index] += event.logprobs
        elif isinstance(event, Finish):
            whole.finishes[index] = event
    return whole


def new_envelope(prefix: str, info: ModelInfo) -> Envelope:
    # The fingerprint changes when something does that can change the answer to the same request and seed.
    setup = f"{info.name} {info.engine_version} {info.device} {info.cache_mode} {info.draft_mode} {info.chunk_size}"
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=info.name,
        system_fingerprint=f"fp_{blake2s(setup.encode(), digest_size=5).hexdigest()}",
    )


def total_usage(finishes: Mapping[int, Finish], n: int) -> Usage:
    """Usage of a request whose answers have all finished.

    Args:
        finishes: by index of the answer, `n` in a row for each prompt. A prompt counts once.
    """
    answers = [finish.usage for finish in finishes.values()]
    prompts = [finishes[index].usage for index in range(0, len(finishes), n)]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    cached_tokens = sum(usage.cached_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in answers)
    prompt_time = max(usage.prompt_seconds for usage in prompts)
    completion_time = max(usage.completion_seconds for usage in answers)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        prompt_time=round(prompt_time, 4),
        prompt_tokens_per_sec=_rate(prompt_tokens - cached_tokens, prompt_time),
        completion_time=round(completion_time, 4),
        completion_tokens_per_sec=_rate(completion_tokens, completion_time),
        total_time=round(prompt_time + completion_time, 4),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if seconds > 0 else None
