"""One request -> one job of the engine -> events.

Seeds: two requests with the same prompt, parameters and seed draw the same random numbers, one for each token that is
sampled, whatever else runs, whether the prompt is cached, and whether tokens are drafted. They give the same text as
long as the model gives the same logits; the engine does not promise the last bits of those for other batch sizes, other
prefill chunks or draft windows, so that two tokens that are all but equally likely may change places.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from backends.exllamav3.cache_lookup import Lookup, look_up
from backends.exllamav3.checkpoints import boundary_pages
from backends.exllamav3.engine import (
    FIRST_IMAGE_ID,
    AsyncGenerator,
    Job,
    MMEmbedding,
    Model,
    Tensor,
    Tokenizer,
    token_tensor,
)
from backends.exllamav3.explanation import explain
from backends.exllamav3.grammar import GrammarFilter
from backends.exllamav3.jobs import AsyncCheckpointJob, CheckpointLedger, Placement
from backends.exllamav3.logprobs import prompt_logprobs
from backends.exllamav3.prompt_history import PromptHistory
from backends.exllamav3.prompt_tokens import PromptEncoder
from backends.exllamav3.sampler import JobSampler, build_sampler
from backends.exllamav3.thoughts import ThoughtBudget
from backends.exllamav3.token_bytes import REPLACEMENT, TokenBytes, token_bytes
from backends.exllamav3.turns import Turns
from backends.exllamav3.vision import Vision, embedded, inserts_of
from common.caching import CacheExplanation
from common.config_models import PAGE_TOKENS
from common.errors import InvalidRequest, Unsupported, check_token_ids, validate_context_requirements
from common.generation import (
    Echo,
    Event,
    Finish,
    GenerationRequest,
    Prefill,
    SampledLogprob,
    TextDelta,
    Thoughts,
    Usage,
)
from common.parsing.thoughts import ThoughtTracker, ending

# A loop is a string that fills the detection window at least this many times.
LOOP_REPETITIONS = 2
# Stands for an image where a prompt is told.
IMAGE_TEXT = b"[image]"
# Times in a row that the engine may take back banned strings: each costs a step, and a list can ban all that there is.
MOST_REWINDS = 1000


@dataclass(frozen=True)
class Limits:
    """What bounds a request on a loaded model, all in tokens."""

    max_seq_len: int
    cache_capacity: int  # less the draft window
    max_rq_tokens: int | None  # output reserved at a time; None: the whole answer at once
    allocation_boundary: int


@dataclass(frozen=True)
class Served:
    """A loaded model, and what its requests have in common.

    Attributes:
        vision: None where the model takes no images.
        add_bos: whether a text gets a BOS token when the request does not say.
        ledger: of the generator's checkpoints.
        turns: of the generator's queue.
        history: of the prompts that it has served; each is added when its job ends.
        on_results: is called whenever the engine has handed a result to a job.
    """

    generator: AsyncGenerator
    tokenizer: Tokenizer
    encoder: PromptEncoder
    vision: Vision | None
    eos_token_ids: list[int]
    add_bos: bool
    limits: Limits
    ledger: CheckpointLedger
    turns: Turns
    history: PromptHistory
    on_results: Callable[[], None]


def start_job(request: GenerationRequest, served: Served) -> EngineJob | PromptJob:
    """Tokenise, check and queue a request.

    Raises:
        ContextLengthExceeded: the prompt does not fit.
        InvalidRequest: the prompt is empty or holds ids outside the vocabulary, or no token may be sampled.
        Unsupported: the prompt is too long for its log-probabilities.
    """
    generator, tokenizer, eos_token_ids = served.generator, served.tokenizer, served.eos_token_ids
    prompt = _read_prompt(request, served)
    prompt_tokens = prompt.ids.shape[-1]
    tokens = token_bytes(tokenizer)
    echo = _prompt_echo(request, prompt.ids, generator, tokenizer) if request.echo else None
    if request.prompt_only:
        return PromptJob(prompt_tokens, echo)

    window = request.sampling.loop_detect_window
    budget = _thought_budget(request.thoughts, tokenizer, served.encoder, tokens)
    sampler = build_sampler(request.sampling, tokenizer, eos_token_ids, top_logprobs=request.logprobs, budget=budget)
    grammar = None
    if request.constraints:
        grammar = GrammarFilter(tokenizer, request.constraints, eos_token_ids, sampler.banned)

    placement = Placement(
        served.ledger,
        boundary_pages(prompt.boundaries, prompt_tokens - (prompt.healed is not None)),
        partial(_explain_prompt, request, prompt, served) if request.explain_cache else None,
    )
    try:
        job = AsyncCheckpointJob(
            generator,
            placement,
            served.turns,
            request.owner,
            served.on_results,
            input_ids=prompt.ids,
            embeddings=prompt.embeddings,
            max_new_tokens=prompt.max_new_tokens,
            min_new_tokens=request.min_tokens,
            sampler=sampler,
            filters=[filter for filter in (grammar, budget) if filter is not None],
            seed=request.seed,
            stop_conditions=[*request.stop_strings, *_known_tokens(request.stop_tokens, tokenizer), *eos_token_ids],
            decode_special_tokens=True,  # the parsers of reasoning and tool calls look for them
            banned_strings=request.banned_strings or None,
            token_healing=prompt.healed is not None,
            max_rq_tokens=prompt.max_rq_tokens,
            # Each token of the window costs memory, and one that the answer cannot fill finds nothing.
            stop_on_loop=(window, LOOP_REPETITIONS) if LOOP_REPETITIONS < window <= prompt.max_new_tokens else None,
        )
    except AssertionError as error:  # the engine's check of a job, such as of the length of banned strings
        raise InvalidRequest(f"The engine cannot serve this request: {error}") from error
    prefix = b"" if prompt.healed is None else tokens[prompt.healed]
    return EngineJob(request, job, prompt_tokens, sampler, grammar, budget, tokens, echo, prefix, served.history)


def explain_request(request: GenerationRequest, served: Served) -> CacheExplanation:
    """What the job of a request would find in the caches. Errors as for `start_job`."""
    generator = served.generator.generator
    prompt = _read_prompt(request, served)
    job = Job(
        input_ids=prompt.ids,
        max_new_tokens=prompt.max_new_tokens,
        token_healing=prompt.healed is not None,
        max_rq_tokens=prompt.max_rq_tokens,
    )
    try:
        job.prepare_for_queue(generator, serial_number=0)
    except AssertionError as error:
        raise InvalidRequest(f"The engine cannot serve this request: {error}") from error
    (sequence,) = job.sequences
    found = look_up(generator, sequence.sequence_ids.torch(), sequence.new_unique_pages)
    return _explain_prompt(request, prompt, served, found)


@dataclass(frozen=True)
class _Prompt:
    """A request's prompt, which fits.

    Attributes:
        ids: (1, tokens).
        embeddings: of its images.
        boundaries: in tokens; none without recurrent layers.
        max_rq_tokens: of the answer, those that room is reserved for at a time; None for all at once.
        healed: the last token, where it is sampled again.
    """

    ids: Tensor
    embeddings: list[MMEmbedding]
    boundaries: list[int]
    max_new_tokens: int
    max_rq_tokens: int | None
    healed: int | None


def _read_prompt(request: GenerationRequest, served: Served) -> _Prompt:
    limits = served.limits
    recurrent = served.generator.generator.recurrent_cache is not None
    if request.images and request.echo:  # log-probabilities of a prompt come from a pass that knows texts only
        raise Unsupported("A prompt with images cannot be reported.", param=request.images[0].param)
    embeddings = embedded(served.vision, request.images)
    ids, boundaries = _prompt_ids(request, served, embeddings, placed=recurrent)
    max_new_tokens = validate_context_requirements(
        ids.shape[-1],
        limits.max_seq_len,
        request.max_tokens,
        limits.cache_capacity,
        limits.max_rq_tokens,
        limits.allocation_boundary,
    )
    # The engine keeps the token that it heals out of its filters, so what that adds to the prompt could be anything.
    filtered = bool(request.constraints) or (request.thoughts is not None and request.thoughts.budget is not None)
    healed = _healed_token(ids, served.tokenizer) if request.token_healing and not filtered else None
    # For an answer shorter than that the engine would reserve as much all the same, and others would have to wait.
    chunked = limits.max_rq_tokens is not None and limits.max_rq_tokens < max_new_tokens
    return _Prompt(ids, embeddings, boundaries, max_new_tokens, limits.max_rq_tokens if chunked else None, healed)


def _explain_prompt(request: GenerationRequest, prompt: _Prompt, served: Served, found: Lookup) -> CacheExplanation:
    return explain(
        served.generator.generator,
        prompt.ids,
        found,
        history=served.history,
        ledger=served.ledger,
        owner=request.owner,
        decode=partial(_text, tokens=token_bytes(served.tokenizer)),
        healed=prompt.healed is not None,
    )


class PromptJob:
    """A request that generates nothing; a `Job` of `backends.worker`."""

    def __init__(self, prompt_tokens: int, echo: PromptEcho | None) -> None:
        self.prompt_tokens = prompt_tokens
        self._echo = echo

    async def events(self) -> AsyncIterator[Event]:
        started = monotonic()
        if self._echo is not None:
            yield await self._echo.event()
        usage = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=0, prompt_seconds=monotonic() - started)
        yield Finish(reason="length", usage=usage)

    async def cancel(self) -> None:
        """Nothing is held between two passes over the prompt."""


class EngineJob:
    """A queued or running job; a `Job` of `backends.worker`."""

    def __init__(
        self,
        request: GenerationRequest,
        job: AsyncCheckpointJob,
        prompt_tokens: int,
        sampler: JobSampler,
        grammar: GrammarFilter | None,
        budget: ThoughtBudget | None,
        tokens: TokenBytes,
        echo: PromptEcho | None,
        healed: bytes,
        history: PromptHistory,
    ) -> None:
        """`healed`: the bytes of the last prompt token where it is sampled again, and so comes with the answer."""
        self.prompt_tokens = prompt_tokens
        self._request = request
        self._job = job
        self._sampler = sampler
        self._grammar = grammar
        self._budget = budget
        self._thoughts = ThoughtTracker(request.thoughts) if request.thoughts is not None else None
        self._tokens = tokens
        self._echo = echo
        self._healed = healed
        self._history = history
        self._position = prompt_tokens - (1 if healed else 0)  # of the next token, in prompt and answer together
        self._prefilled = 0
        self._rewinds = 0  # since the last token

    async def events(self) -> AsyncIterator[Event]:
        if self._echo is not None:
            yield await self._echo.event()
        generating = False
        async for result in self._job:
            if self._grammar is not None:
                self._grammar.check()
            if self._budget is not None:
                self._budget.check()
            self._sampler.check()
            if result["stage"] == "streaming":
                generating = True
                delta, finish = self._streamed(result)
                if delta.text or delta.token_ids:
                    yield delta
                if finish is not None:
                    yield finish
            elif not generating:  # else the engine processes tokens of the answer again
                yield self._prefill(result)

    async def cancel(self) -> None:
        """End the job where it runs. The prompt, asked for again, goes on from the last prefill chunk that is done."""
        try:
            self._job.keep_progress()
        finally:
            await self._job.cancel()
        if ids := self._job.job.processed_ids():
            self._history.remember(self._request.owner, ids)

    def _prefill(self, result: dict[str, Any]) -> Prefill:
        """Progress; the first comes as soon as the job has left the queue.

        The last prompt token counts as done with the one before it: it is processed in the pass that gives the first
        token of the answer.
        """
        job = self._job.job
        cached = job.cached_pages * PAGE_TOKENS + job.cached_tokens
        done = 0
        if result["stage"] == "prefill":
            done = self.prompt_tokens - (result["max_progress"] - result["curr_progress"])
        # The job may have moved on since this result.
        self._prefilled = max(self._prefilled, cached, done)
        return Prefill(done_tokens=self._prefilled, total_tokens=self.prompt_tokens, cached_tokens=cached)

    def _streamed(self, result: dict[str, Any]) -> tuple[TextDelta, Finish | None]:
        token_ids = _id_list(result.get("token_ids"))
        eos_reason: str | None = result["eos_reason"] if result["eos"] else None
        stop_sequence: str | None = None
        if eos_reason == "max_new_tokens" and self._grammar is not None and self._grammar.complete:
            eos_reason = "end_filter"  # with the last token that it might have
        if eos_reason == "stop_token":
            # What was held back, as it might have begun a stop string or a character, is text after all.
            *token_ids, _ = _id_list(result["held"]["token_ids"])
            stop_sequence = result["eos_triggering_token_str"]
        raws = self._raws(token_ids)
        text = whole = b"".join(raws).decode(errors="replace")
        match eos_reason:
            case None:
                self._count_rewind(result, token_ids)
            case "stop_string":
                # After half a character the engine decodes anew what it has held back, the stop string included.
                text, _ = _cut_at_stop(result.get("text", ""), self._request.stop_strings)
                stop_sequence = result["eos_triggering_string"]
            case "max_new_tokens" | "end_filter":
                # The engine does not look for strings in the token with which an answer ends for another reason.
                text, stop_sequence = _cut_at_stop(text, self._request.stop_strings)
                if stop_sequence is not None:
                    eos_reason = "stop_string"
                elif eos_reason == "max_new_tokens":
                    text = _cut_at_ban(text, self._request.banned_strings)
        if text != whole:
            raws = cut_to_length(raws, len(text))
            token_ids = token_ids[: len(raws)]
        delta = TextDelta(text=text, token_ids=token_ids, logprobs=self._logprobs(token_ids, raws))
        self._position += len(token_ids)
        self._follow_thoughts(raws)
        if token_ids:
            self._healed = b""
        if eos_reason is None:
            return delta, None
        return delta, self._finish(result, eos_reason, stop_sequence)

    def _finish(self, result: dict[str, Any], eos_reason: str, stop_sequence: str | None) -> Finish:
        found = self._job.job.found
        assert found is not None, "an answer of a job that has not left the queue"
        cached_tokens = result["cached_tokens"]
        return Finish(
            reason="length" if eos_reason == "max_new_tokens" else "stop",
            eos_reason=eos_reason,
            stop_sequence=stop_sequence,
            usage=Usage(
                prompt_tokens=result["prompt_tokens"],
                completion_tokens=result["new_tokens"],
                reasoning_tokens=0 if self._thoughts is None else self._thoughts.tokens,
                cached_tokens=cached_tokens,
                # Without recurrent layers the engine finds more while it processes the prompt.
                matched_tokens=max(found.matched, cached_tokens),
                ram_tokens=found.ram,
                disk_tokens=found.disk,
                explanation=self._job.job.explanation,
                accepted_draft_tokens=result.get("accepted_draft_tokens", 0),
                rejected_draft_tokens=result.get("rejected_draft_tokens", 0),
                queue_seconds=result["time_enqueued"],
                prompt_seconds=result["time_prefill"],
                completion_seconds=result["time_generate"],
            ),
        )

    def _raws(self, token_ids: list[int]) -> list[bytes]:
        raws = [self._tokens[token_id] for token_id in token_ids]
        if self._healed and raws:
            raws[0] = raws[0].removeprefix(self._healed)
        return raws

    def _follow_thoughts(self, raws: list[bytes]) -> None:
        if self._thoughts is not None:
            for index, raw in enumerate(raws):
                # A healed token is one of the prompt, and so not among those of the answer that the engine counts.
                self._thoughts.feed(raw, counts=index > 0 or not self._healed)

    def _logprobs(self, token_ids: list[int], raws: list[bytes]) -> list[SampledLogprob]:
        if self._request.logprobs is None:
            return []
        entries: list[SampledLogprob] = []
        for index, (token_id, raw) in enumerate(zip(token_ids, raws, strict=True)):
            scores = self._sampler.scores(self._position + index)
            assert scores is not None, "a token without its log-probability"
            entries += scores.entries([token_id], [raw], self._tokens)
        return entries

    def _count_rewind(self, result: dict[str, Any], token_ids: list[int]) -> None:
        if token_ids:
            self._rewinds = 0
        if "suppressed_text" in result:
            self._rewinds += 1
        if self._rewinds > MOST_REWINDS:
            raise InvalidRequest(
                f"The answer cannot go on: {MOST_REWINDS} tokens in a row led to banned strings. "
                "Ban fewer or longer ones.",
                param="banned_strings",
            )


@dataclass(frozen=True)
class PromptEcho:
    """What is needed to report a prompt."""

    text: str
    token_ids: list[int]
    model: Model
    vocab_size: int
    tokens: TokenBytes
    logprobs: int | None  # as in GenerationRequest

    async def event(self) -> Echo:
        if self.logprobs is None:
            return Echo(self.text, self.token_ids)
        entries = await prompt_logprobs(self.model, self.token_ids, self.vocab_size, self.logprobs, self.tokens)
        return Echo(self.text, self.token_ids, entries)


def _prompt_echo(
    request: GenerationRequest, ids: Tensor, generator: AsyncGenerator, tokenizer: Tokenizer
) -> PromptEcho:
    engine = generator.generator
    token_ids = _id_list(ids)
    if request.logprobs is not None and len(token_ids) > engine.max_chunk_size:
        raise Unsupported(
            f"Log-probabilities are given of prompts of up to {engine.max_chunk_size} tokens, as many as one pass of "
            f"the model takes; this prompt has {len(token_ids)}. Shorten it, leave out logprobs, or load the model "
            "with a larger chunk_size.",
            param="logprobs",
        )
    tokens = token_bytes(tokenizer)
    text = request.prompt
    if not isinstance(text, str):
        text = _text(token_ids, tokens)
    return PromptEcho(text, token_ids, engine.model, tokenizer.actual_vocab_size, tokens, request.logprobs)


def _prompt_ids(
    request: GenerationRequest, served: Served, embeddings: list[MMEmbedding], *, placed: bool
) -> tuple[Tensor, list[int]]:
    """The prompt and, where `placed`, its boundaries in tokens."""
    boundaries: list[int] = request.cache_boundaries if placed else []
    if isinstance(request.prompt, str):
        ids, boundaries = served.encoder.encode_placed(
            request.prompt,
            boundaries,
            add_bos=served.add_bos if request.add_bos is None else request.add_bos,
            encode_special_tokens=request.encode_special_tokens,
            literals=request.literals,
            inserts=inserts_of(request.images, embeddings),
        )
    else:
        check_token_ids(request.prompt, served.tokenizer.actual_vocab_size, "prompt")
        ids = request.prompt
        boundaries = [boundary for boundary in boundaries if 0 <= boundary <= len(ids)]
    if not ids:
        raise InvalidRequest("prompt is empty: the model needs at least one token to start from.", param="prompt")
    return token_tensor(ids), boundaries


def _thought_budget(
    thoughts: Thoughts | None, tokenizer: Tokenizer, encoder: PromptEncoder, tokens: TokenBytes
) -> ThoughtBudget | None:
    if thoughts is None or thoughts.budget is None:
        return None
    return ThoughtBudget(tokenizer, thoughts, encoder.encode(ending(thoughts), add_bos=False), tokens)


def _healed_token(ids: Tensor, tokenizer: Tokenizer) -> int | None:
    """The last prompt token, if one that begins with the same text may take its place; None where that cannot be.

    A control token has no text to go on from, a token that ends inside a character has none that could be compared, and
    a prompt must not become empty.
    """
    *before, last = _id_list(ids)
    if not before or last in tokenizer.extended_id_to_piece or last >= FIRST_IMAGE_ID:
        return None
    piece: str = tokenizer.get_id_to_piece_list(False)[last]
    return last if piece and REPLACEMENT not in piece else None


def _known_tokens(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Those of the vocabulary. One outside of it is never sampled, and a generator that meets it ends for everybody.

    Biases and bans of such tokens are left out by the engine itself.
    """
    return [token for token in tokens if token < tokenizer.actual_vocab_size]


def _id_list(ids: Tensor | None) -> list[int]:
    """Of ids, (1, tokens)."""
    if ids is None:
        return []
    rows: list[list[int]] = ids.tolist()
    return rows[0]


def _text(token_ids: list[int], tokens: TokenBytes) -> str:
    pieces: list[bytes] = []
    for token_id in token_ids:
        if token_id < FIRST_IMAGE_ID:
            pieces.append(tokens[token_id])
        elif pieces[-1:] != [IMAGE_TEXT]:
            pieces.append(IMAGE_TEXT)
    return b"".join(pieces).decode(errors="replace")


def _cut_at_stop(text: str, stop_strings: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that string; the whole text and None without one."""
    found = [(position, stop) for stop in stop_strings if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop


def _cut_at_ban(text: str, banned_strings: list[str]) -> str:
    """The text before the first banned string, in whatever case."""
    found = [match.start() for banned in banned_strings if (match := re.search(re.escape(banned), text, re.IGNORECASE))]
    return text[: min(found, default=len(text))]


def cut_to_length(raws: list[bytes], length: int) -> list[bytes]:
    """The bytes of the tokens that have a part in the first `length` characters of their text; the last may be cut."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    joined = b"".join(raws)
    characters = end = 0
    while characters < length and end < len(joined):
        characters += len(decoder.decode(joined[end : end + 1]))
        end += 1
    if characters > length:
        end -= 1  # a broken character shows only when the next one begins
    kept = []
    for raw in raws:
        if end <= 0:
            break
        kept.append(raw[:end])
        end -= len(raw)
    return kept
