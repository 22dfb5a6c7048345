"""Text completions: request -> generation requests, events -> chunks or one response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from common.errors import Unsupported
from common.generation import Finish, GenerationRequest, Prefill, SampledLogprob, TextDelta
from endpoints.OAI.types.common import Envelope
from endpoints.OAI.types.completion import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from endpoints.OAI.utils.generation import collect, generation_requests, total_usage
from endpoints.streaming import IndexedEvents


def completion_generation_requests(body: CompletionRequest) -> list[GenerationRequest]:
    """`n` requests for each prompt, in order. Raises `InvalidRequest` for what cannot be served as it is."""
    _refuse_unsupported(body)
    return [
        request
        for prompt in body.prompt
        for request in generation_requests(prompt, body, logprobs=_logprobs(body), add_bos=body.add_bos_token)
    ]


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.echo:
        raise Unsupported("echo is not available here; leave it out.", param="echo")
    if body.suffix:
        raise Unsupported("suffix is not available here; leave it out.", param="suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported(f"best_of ({body.best_of}) must be n ({body.n}): answers are not ranked.", param="best_of")


def _logprobs(body: CompletionRequest) -> int | None:
    """How many alternatives to report for each token; None for no log-probabilities. 0 counts as a number here."""
    if body.logprobs is None or body.logprobs is False:
        return None
    return body.top_logprobs or (0 if body.logprobs is True else body.logprobs)


class CompletionCodec:
    """Renders the answers to one text completion.

    Args:
        n: answers to each prompt.
        prompts: how many prompts there are.
    """

    def __init__(self, envelope: Envelope, n: int, prompts: int, *, include_usage: bool) -> None:
        self._head = envelope.model_dump()
        self._n = n
        self._answers = n * prompts
        self._include_usage = include_usage

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        offsets = [0] * self._answers  # characters of the answers that have been sent
        finishes: dict[int, Finish] = {}
        async for index, event in answers:
            if isinstance(event, Prefill):
                continue
            if isinstance(event, Finish):
                finishes[index] = event
                yield self._chunk(_final_choice(index, "", None, event))
            elif isinstance(event, TextDelta) and (event.text or event.logprobs):
                logprobs = _render(event.logprobs, offsets[index])
                offsets[index] += len(event.text)
                yield self._chunk(CompletionChoice(index=index, text=event.text, logprobs=logprobs))
        if self._include_usage:
            usage = total_usage(finishes, self._n)
            yield Completion(**self._head, choices=[], usage=usage).model_dump_json()

    async def collect(self, answers: IndexedEvents) -> Completion:
        texts, logprobs, finishes = await collect(answers, self._answers)
        choices = [
            _final_choice(index, texts[index], _render(logprobs[index], 0), finishes[index])
            for index in range(self._answers)
        ]
        return Completion(**self._head, choices=choices, usage=total_usage(finishes, self._n))

    def _chunk(self, choice: CompletionChoice) -> str:
        return Completion(**self._head, choices=[choice]).model_dump_json()


def _final_choice(index: int, text: str, logprobs: CompletionLogprobs | None, finish: Finish) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=finish.reason,
        eos_reason=finish.eos_reason,
        stop_str=finish.stop_sequence,
    )


def _render(logprobs: Sequence[SampledLogprob], offset: int) -> CompletionLogprobs | None:
    """The lists for some tokens, of which the first stands `offset` characters from the start of the answer."""
    if not logprobs:
        return None
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.token)
    return CompletionLogprobs(
        tokens=[entry.token for entry in logprobs],
        token_logprobs=[entry.logprob for entry in logprobs],
        # As at OpenAI, the sampled token is there even when it is not among the most likely.
        top_logprobs=[
            {entry.token: entry.logprob} | {other.token: other.logprob for other in entry.top} for entry in logprobs
        ],
        text_offset=offsets,
    )
