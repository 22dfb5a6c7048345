"""One request -> one job of the engine -> events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from backends.exllamav3.engine import AsyncGenerator, AsyncJob, Tensor, Tokenizer, token_tensor
from backends.exllamav3.sampler import build_sampler
from common.errors import InvalidRequest, validate_context_requirements
from common.generation import (
    Event,
    Finish,
    GenerationRequest,
    Prefill,
    SampledLogprob,
    TextDelta,
    TokenLogprob,
    Usage,
)

# A loop is a string that fills the detection window at least this many times.
LOOP_REPETITIONS = 2
# Probabilities of 0 have no finite logarithm; this stands for "as good as never".
LOWEST_LOGPROB = -1000.0


@dataclass(frozen=True)
class Limits:
    """What bounds a request on a loaded model, all in tokens."""

    max_seq_len: int
    cache_capacity: int  # less the draft window
    max_rq_tokens: int | None  # output reserved at a time; None: the whole answer at once
    allocation_boundary: int


def start_job(
    request: GenerationRequest,
    *,
    generator: AsyncGenerator,
    tokenizer: Tokenizer,
    eos_token_ids: list[int],
    add_bos: bool,
    limits: Limits,
) -> EngineJob:
    """Tokenise, check and queue a request.

    Args:
        add_bos: whether a text gets a BOS token when the request does not say.

    Raises:
        ContextLengthExceeded: the prompt does not fit.
        InvalidRequest: the prompt is empty or holds ids outside the vocabulary, or no token may be sampled.
    """
    ids = _prompt_ids(request, tokenizer, add_bos)
    prompt_tokens = ids.shape[-1]
    max_new_tokens = validate_context_requirements(
        prompt_tokens,
        limits.max_seq_len,
        request.max_tokens,
        limits.cache_capacity,
        limits.max_rq_tokens,
        limits.allocation_boundary,
    )
    window = request.sampling.loop_detect_window
    job = AsyncJob(
        generator,
        input_ids=ids,
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_tokens,
        sampler=build_sampler(request.sampling, tokenizer, eos_token_ids),
        seed=request.seed,
        stop_conditions=[*request.stop_strings, *_known_tokens(request.stop_tokens, tokenizer), *eos_token_ids],
        decode_special_tokens=True,  # the parsers of reasoning and tool calls look for them
        banned_strings=request.banned_strings or None,
        token_healing=request.token_healing,
        return_probs=request.logprobs is not None,
        return_top_tokens=request.logprobs or 0,
        max_rq_tokens=limits.max_rq_tokens,
        # Each token of the window costs memory, and one that the answer cannot fill finds nothing.
        stop_on_loop=(window, LOOP_REPETITIONS) if LOOP_REPETITIONS < window <= max_new_tokens else None,
    )
    return EngineJob(job, prompt_tokens, tokenizer)


class EngineJob:
    """A queued or running job; the `Job` of `backends.worker`."""

    def __init__(self, job: AsyncJob, prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self.prompt_tokens = prompt_tokens
        self._job = job
        self._tokenizer = tokenizer

    async def events(self) -> AsyncIterator[Event]:
        async for result in self._job:
            if result["stage"] == "prefill":
                yield Prefill(done_tokens=result["curr_progress"], total_tokens=result["max_progress"])
            if result["stage"] != "streaming":
                continue
            text = result.get("text", "")
            token_ids = _id_list(result.get("token_ids"))
            if text or token_ids:
                yield TextDelta(text=text, token_ids=token_ids, logprobs=self._logprobs(result, token_ids))
            if result["eos"]:
                yield _finish(result)

    async def cancel(self) -> None:
        await self._job.cancel()

    def _logprobs(self, result: dict[str, Any], token_ids: list[int]) -> list[SampledLogprob]:
        probabilities = result.get("token_probs")
        if probabilities is None:
            return []
        top_ids, top_probabilities = result.get("top_k_tokens"), result.get("top_k_probs")
        entries = []
        for index, (token_id, probability) in enumerate(zip(token_ids, probabilities.flatten().tolist(), strict=True)):
            top: list[TokenLogprob] = []
            if top_ids is not None and top_probabilities is not None:
                pairs = zip(top_ids[0, index].tolist(), top_probabilities[0, index].tolist(), strict=True)
                top = [TokenLogprob(i, self._piece(i), self._piece(i).encode(), _log(p)) for i, p in pairs]
            piece = self._piece(token_id)
            entries.append(SampledLogprob(token_id, piece, piece.encode(), _log(probability), top))
        return entries

    def _piece(self, token_id: int) -> str:
        pieces: list[str] = self._tokenizer.get_id_to_piece_list(True)
        return pieces[token_id] if token_id < len(pieces) else ""


def _prompt_ids(request: GenerationRequest, tokenizer: Tokenizer, add_bos: bool) -> Tensor:
    ids: Tensor
    if isinstance(request.prompt, str):
        ids = tokenizer.encode(
            request.prompt,
            add_bos=add_bos if request.add_bos is None else request.add_bos,
            encode_special_tokens=request.encode_special_tokens,
        )
    else:
        check_token_ids(request.prompt, tokenizer, "prompt")
        ids = token_tensor(request.prompt)
    if ids.shape[-1] == 0:
        raise InvalidRequest("prompt is empty: the model needs at least one token to start from.", param="prompt")
    return ids


def _known_tokens(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Those of the vocabulary. One outside of it is never sampled, and a generator that meets it ends for everybody.

    Biases and bans of such tokens are left out by the engine itself.
    """
    return [token for token in tokens if token < tokenizer.actual_vocab_size]


def check_token_ids(tokens: list[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise InvalidRequest for an id that the model has no embedding for."""
    size: int = tokenizer.actual_vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise InvalidRequest(
                f"{param} holds token id {token}; ids of this model go from 0 to {size - 1}.", param=param
            )


def _id_list(ids: Tensor | None) -> list[int]:
    if ids is None:
        return []
    flat: list[int] = ids.flatten().tolist()
    return flat


def _log(probability: float) -> float:
    return max(math.log(probability), LOWEST_LOGPROB) if probability > 0 else LOWEST_LOGPROB


def _finish(result: dict[str, Any]) -> Finish:
    eos_reason: str = result["eos_reason"]
    return Finish(
        reason="length" if eos_reason == "max_new_tokens" else "stop",
        eos_reason=eos_reason,
        stop_sequence=result.get("eos_triggering_string") or result.get("eos_triggering_token_str"),
        usage=Usage(
            prompt_tokens=result["prompt_tokens"],
            completion_tokens=result["new_tokens"],
            cached_tokens=result["cached_tokens"],
            accepted_draft_tokens=result.get("accepted_draft_tokens", 0),
            rejected_draft_tokens=result.get("rejected_draft_tokens", 0),
            queue_seconds=result["time_enqueued"],
            prompt_seconds=result["time_prefill"],
            completion_seconds=result["time_generate"],
        ),
    )
