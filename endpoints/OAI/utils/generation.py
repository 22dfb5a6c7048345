"""What both generating routes share: fields -> generation requests, pieces of answers -> chunks or a whole response."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from hashlib import blake2s
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from backends.messages import ModelInfo
from common import generation
from common.errors import InvalidRequest, Unsupported
from common.generation import (
    Constraint,
    Event,
    Finish,
    FinishReason,
    GenerationRequest,
    ImageInput,
    Prefill,
    TextDelta,
    TextSpan,
    Thoughts,
)
from common.limits import MAX_ANSWERS
from endpoints.core.types.cache import CacheExplanation
from endpoints.OAI.types.common import (
    Choice,
    CompletionTokensDetails,
    Envelope,
    GenerationFields,
    PromptProgress,
    PromptTokensDetails,
    Usage,
)
from endpoints.streaming import (
    IndexedEvents,
    Queued,
)

P = TypeVar("P", bound=Choice)
R = TypeVar("R", bound=BaseModel)
C = TypeVar("C", bound=BaseModel)
T = TypeVar("T")

# --- requests -----------------------------------------------------------------------------------------------------


def generation_requests(
    prompt: str | list[int],
    fields: GenerationFields,
    *,
    count: int,
    logprobs: int | None,
    constraints: Sequence[Constraint] = (),
    add_bos: bool | None = None,
    literals: Sequence[TextSpan] = (),
    images: Sequence[ImageInput] = (),
    stop_strings: Sequence[str] = (),
    thoughts: Thoughts | None = None,
    echo: bool = False,
    prompt_only: bool = False,
    cache_boundaries: Sequence[int] = (),
) -> list[GenerationRequest]:
    """`count` requests for one prompt. With a seed each gets one of its own, else all answers would be the same.

    Args:
        stop_strings: those of the template, beside the request's own.

    Raises:
        InvalidRequest: fields contradict each other, or ask for what only other servers have.
    """
    _refuse_unsupported(fields)
    request = GenerationRequest(
        prompt=prompt,
        sampling=fields.parameters(),
        add_bos=add_bos,
        literals=list(literals),
        images=list(images),
        stop_strings=[*fields.stop_strings, *stop_strings],
        stop_tokens=[*fields.stop_tokens, *fields.stop_token_ids],
        max_tokens=max(0, fields.max_tokens),
        min_tokens=fields.min_tokens,
        seed=fields.seed,
        banned_strings=fields.banned_strings,
        token_healing=fields.token_healing,
        logprobs=logprobs,
        constraints=list(constraints),
        thoughts=thoughts,
        echo=echo,
        prompt_only=prompt_only,
        cache_boundaries=list(cache_boundaries),
    )
    if fields.seed is None:
        return [request] * count
    return [msgspec.structs.replace(request, seed=fields.seed + index) for index in range(count)]


def check_answers(prompts: int, per_prompt: int, param: str) -> None:
    """Raise `InvalidRequest` where a request asks for too many answers.

    Args:
        param: the field that asks for so many for each prompt.
    """
    if prompts * per_prompt > MAX_ANSWERS:
        raise InvalidRequest(
            f"{prompts} prompts with {per_prompt} answers to each are {prompts * per_prompt} answers; a request may "
            f"ask for {MAX_ANSWERS}. Send fewer prompts at once, or lower {param}.",
            param=param,
        )


def _refuse_unsupported(fields: GenerationFields) -> None:
    if fields.prompt_logprobs is not None and fields.stream:
        raise Unsupported("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    if other := [name for name in fields.modalities if name != "text"]:
        raise Unsupported(f"modalities may hold text only; there is no {other[0]!r} here.", param="modalities")


def most_logprobs(answer: int | None, prompt: int | None) -> int | None:
    """The one number that the engine is asked for, where answer and prompt want different ones."""
    return max((number for number in (answer, prompt) if number is not None), default=None)


# --- answers ------------------------------------------------------------------------------------------------------


class Codec(ABC, Generic[P, R, C]):
    """Renders the answers to one request. A whole answer is put together from the pieces that a stream would send.

    Its types are a piece of an answer, a whole response, and a chunk of a stream.

    Args:
        envelope: what every response begins with.
        fields: of the request.
        per_prompt: answers that are generated for each prompt; those of a prompt follow each other.
    """

    def __init__(self, envelope: Envelope, fields: GenerationFields, per_prompt: int) -> None:
        self._head: dict[str, Any] = envelope.model_dump()
        self._fields = fields
        self._per_prompt = per_prompt
        self._tally = Tally(per_prompt)

    @abstractmethod
    def pieces(self, index: int, event: Event) -> Iterator[P]:
        """What an event adds to its answer. Called for the events of an answer in their order; never for a Prefill."""

    @abstractmethod
    def chunk(self, choices: list[P], *, usage: Usage | None = None, progress: PromptProgress | None = None) -> C:
        """A piece of a stream."""

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[P]], usage: Usage) -> R:
        """The response to a request that is not streamed.

        Args:
            answers: by index, the pieces of each.
        """

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        """One JSON text for each server-sent event, the terminator left out."""
        options = self._fields.stream_options
        started = time.monotonic()
        # All chunks with nothing but a piece are the same around it.
        before = self.chunk([]).model_dump_json().removesuffix("]}")
        async for index, event in self._counted(answers):
            if not isinstance(event, Prefill):
                for piece in self.pieces(index, event):
                    if options.usage_so_far:
                        yield self.chunk([piece], usage=self._tally.usage_of(index)).model_dump_json()
                    else:
                        yield f"{before}{piece.model_dump_json()}]}}"
            elif self._fields.shows_progress:
                yield self.chunk(
                    [], progress=prompt_progress(index, event, time.monotonic() - started)
                ).model_dump_json()
        if options.include_usage:
            yield self.chunk([], usage=self._tally.usage()).model_dump_json()

    async def collect(self, answers: IndexedEvents) -> R:
        pieces: dict[int, list[P]] = {}
        async for index, event in self._counted(answers):
            if not isinstance(event, Prefill):
                pieces.setdefault(index, []).extend(self.pieces(index, event))
        return self.whole([pieces[index] for index in sorted(pieces)], self._tally.usage())

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        """How an answer that was read to its finish has ended, as the client is told."""
        return finish.reason

    async def _counted(self, answers: IndexedEvents) -> AsyncIterator[tuple[int, Event]]:
        async for index, event in answers:
            self._tally.count(index, event)
            if isinstance(event, Queued):
                continue
            if self._fields.include_stop_str_in_output and isinstance(event, Finish):
                yield index, TextDelta(event.stop_sequence or "" if event.eos_reason == "stop_string" else "")
            yield index, event


def how_it_ended(finish: Finish) -> dict[str, Any]:
    """The members of a `Choice` that say so."""
    return {
        "finish_reason": finish.reason,
        "eos_reason": finish.eos_reason,
        "stop_str": finish.stop_sequence,
    }


def prompt_progress(index: int, event: Prefill, seconds: float) -> PromptProgress:
    return PromptProgress(
        index=index,
        total=event.total_tokens,
        cache=event.cached_tokens,
        processed=event.done_tokens,
        time_ms=round(seconds * 1000),
    )


def new_envelope(prefix: str, info: ModelInfo) -> Envelope:
    # The fingerprint changes when something does that can change the answer to the same request and seed.
    setup = f"{info.name} {info.engine_version} {info.device} {info.cache_mode} {info.draft_mode} {info.chunk_size}"
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=info.name,
        system_fingerprint=f"fp_{blake2s(setup.encode(), digest_size=5).hexdigest()}",
    )


# --- usage --------------------------------------------------------------------------------------------------------


class Tally:
    """What the answers to a request have used so far."""

    def __init__(self, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._usages: dict[int, generation.Usage] = {}

    def count(self, index: int, event: Event | Queued) -> None:
        if isinstance(event, Queued):
            self._usages[index] = generation.Usage(prompt_tokens=event.prompt_tokens, completion_tokens=0)
        elif isinstance(event, Finish):
            self._usages[index] = event.usage
        elif isinstance(event, TextDelta):
            so_far = self._usages[index]
            completion_tokens = so_far.completion_tokens + len(event.token_ids)
            self._usages[index] = msgspec.structs.replace(so_far, completion_tokens=completion_tokens)

    def usage_of(self, index: int) -> Usage:
        return total_usage({0: self._usages[index]}, 1)

    def usage(self) -> Usage:
        return total_usage(self._usages, self._per_prompt)


def total_usage(usages: Mapping[int, generation.Usage], per_prompt: int) -> Usage:
    """The usage of a request from that of its answers.

    Args:
        usages: by index of the answer, `per_prompt` in a row for each prompt. A prompt counts once.
    """
    answers = usages.values()
    prompts = [usages[index] for index in range(0, len(usages), per_prompt)]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    details = _prompt_details(prompts)
    completion_tokens = sum(usage.completion_tokens for usage in answers)
    prompt_time = max(usage.prompt_seconds for usage in prompts)
    completion_time = max(usage.completion_seconds for usage in answers)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=details,
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(usage.accepted_draft_tokens for usage in answers),
            rejected_prediction_tokens=sum(usage.rejected_draft_tokens for usage in answers),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in answers),
        ),
        queue_time=round(max(usage.queue_seconds for usage in answers), 4),
        prompt_time=round(prompt_time, 4),
        prompt_tokens_per_sec=_rate(prompt_tokens - details.cached_tokens, prompt_time),
        completion_time=round(completion_time, 4),
        completion_tokens_per_sec=_rate(completion_tokens, completion_time),
        total_time=round(prompt_time + completion_time, 4),
    )


def _prompt_details(prompts: Sequence[generation.Usage]) -> PromptTokensDetails:
    cached = sum(usage.cached_tokens for usage in prompts)
    matched = sum(usage.matched_tokens for usage in prompts)
    ram = sum(usage.ram_tokens for usage in prompts)
    disk = sum(usage.disk_tokens for usage in prompts)
    return PromptTokensDetails(
        cached_tokens=cached,
        vram_tokens=cached - ram - disk,
        ram_tokens=ram,
        disk_tokens=disk,
        matched_tokens=matched,
        replayed_tokens=matched - cached,
        explanation=CacheExplanation.of(prompts[0].explanation),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if seconds > 0 else None
