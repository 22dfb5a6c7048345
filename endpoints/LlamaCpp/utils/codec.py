"""Events -> answers as llama.cpp's server gives them."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from backends.messages import ModelInfo
from common.generation import Event, Finish, FinishReason, Prefill, SampledLogprob, TextDelta, TokenLogprob
from endpoints.core.types.cache import CacheExplanation
from endpoints.errors import dump_json
from endpoints.LlamaCpp.types.request import CompletionFields
from endpoints.LlamaCpp.types.response import LlamaCppCompletion, Piece, SampledProbability, StopType, TokenProbability
from endpoints.LlamaCpp.utils.requests import Asked
from endpoints.LlamaCpp.utils.settings import generation_settings
from endpoints.LlamaCpp.utils.timings import Stopwatch, timings
from endpoints.streaming import IndexedEvents, Queued

JsonObject: TypeAlias = dict[str, Any]

_MISSING: Final = object()


class CompletionCodec:
    """Renders the answers to one request.

    Args:
        fields: of the body, with presets applied.
        asked: the answers, by index.
        info: of the model.
        prompt_only: the client wants no text.
    """

    def __init__(
        self, fields: CompletionFields, asked: Sequence[Asked], info: ModelInfo, *, prompt_only: bool = False
    ) -> None:
        self._fields = fields
        self._answers = [_Answer(index, fields, one, info, prompt_only) for index, one in enumerate(asked)]

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        """One JSON text for each server-sent event."""
        async for index, event in answers:
            answer = self._answers[index]
            if isinstance(event, Finish):
                yield dump_json(self._selected(answer.whole(event, [])))
            else:
                for piece in answer.pieces(event):
                    yield piece.model_dump_json()

    async def collect(self, answers: IndexedEvents) -> JsonObject | list[JsonObject]:
        """The answer, or a list where there are several."""
        pieces: list[list[Piece]] = [[] for _ in self._answers]
        whole: dict[int, JsonObject] = {}
        async for index, event in answers:
            answer = self._answers[index]
            if isinstance(event, Finish):
                whole[index] = self._selected(answer.whole(event, pieces[index]))
            else:
                pieces[index] += answer.pieces(event)
        return whole[0] if len(whole) == 1 else [whole[index] for index in sorted(whole)]

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        return finish.reason

    def _selected(self, answer: LlamaCppCompletion) -> JsonObject:
        """The members that the client wants to see. What a path names stands at the top, under that path."""
        values = answer.model_dump()
        if not self._fields.response_fields:
            return values
        found = {path: _at(values, path) for path in self._fields.response_fields}
        return {path: value for path, value in found.items() if value is not _MISSING}


def _at(value: object, path: str) -> object:
    for name in path.split("/"):
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


class _Answer:
    """One answer, rendered as it comes."""

    def __init__(self, index: int, fields: CompletionFields, asked: Asked, info: ModelInfo, prompt_only: bool) -> None:
        self._index = index
        self._fields = fields
        self._asked = asked
        self._info = info
        self._prompt_only = prompt_only
        self._stopwatch = Stopwatch()
        self._has_new_line = False

    def pieces(self, event: Event | Queued) -> Iterator[Piece]:
        """What an event other than a Finish adds."""
        if isinstance(event, Queued):
            self._stopwatch.start(event.prompt_tokens)
        elif isinstance(event, Prefill):
            progress = self._stopwatch.prefill(self._index, event)
            if self._fields.shows_progress:
                yield self._piece(prompt_progress=progress)
        elif isinstance(event, TextDelta) and not self._prompt_only:
            for delta in _by_token(event):
                self._stopwatch.count(len(delta.token_ids))
                self._has_new_line |= "\n" in delta.text
                probabilities = [_sampled(entry, self._fields.n_probs) for entry in delta.logprobs]
                yield self._piece(
                    content=delta.text,
                    tokens=delta.token_ids,
                    timings=timings(self._stopwatch.usage()) if self._fields.timings_per_token else None,
                    completion_probabilities=probabilities or None,
                )

    def _piece(self, **values: Any) -> Piece:
        return Piece(
            index=self._index,
            tokens_predicted=self._stopwatch.completion_tokens,
            tokens_evaluated=self._stopwatch.prompt_tokens,
            **values,
        )

    def whole(self, finish: Finish, pieces: Sequence[Piece]) -> LlamaCppCompletion:
        """
        Args:
            pieces: all of them; none where they were sent already.
        """
        request, usage = self._asked.request, finish.usage
        stop_type = _stop_type(finish)
        truncated = finish.reason == "length" and not 0 < request.max_tokens <= usage.completion_tokens
        n_predict = request.max_tokens or -1
        if self._prompt_only:
            usage = msgspec.structs.replace(usage, completion_tokens=0, completion_seconds=0.0)
            stop_type, truncated, n_predict = "limit", False, 0
        tokens = [token for piece in pieces for token in piece.tokens]
        probabilities = [entry for piece in pieces for entry in piece.completion_probabilities or []]
        return LlamaCppCompletion(
            index=self._index,
            content="".join(piece.content for piece in pieces),
            tokens=tokens if self._fields.return_tokens else [],
            model=self._info.name,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=generation_settings(request, n_predict, self._fields, self._info),
            prompt=self._asked.prompt,
            has_new_line=self._has_new_line,
            truncated=truncated,
            stop_type=stop_type,
            stopping_word=(finish.stop_sequence or "") if stop_type == "word" else "",
            tokens_cached=usage.cached_tokens,
            timings=timings(usage),
            completion_probabilities=probabilities or None,
            cache_explanation=CacheExplanation.of(usage.explanation),
        )


def _stop_type(finish: Finish) -> StopType:
    if finish.reason == "length" or finish.eos_reason == "loop_detected":
        return "limit"
    return "word" if finish.eos_reason == "stop_string" else "eos"


def _by_token(delta: TextDelta) -> Iterator[TextDelta]:
    """A delta for each token, where they have probabilities: clients take those in an event for those of its text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start = 0
    for entry in delta.logprobs[:-1]:
        end = start + len(decoder.decode(entry.raw))
        yield TextDelta(delta.text[start:end], [entry.token_id], [entry])
        start = end
    yield TextDelta(delta.text[start:], delta.token_ids[max(0, len(delta.logprobs) - 1) :], delta.logprobs[-1:])


def _sampled(entry: SampledLogprob, alternatives: int) -> SampledProbability:
    return SampledProbability(
        **_probability(entry).model_dump(), top_logprobs=[_probability(other) for other in entry.top[:alternatives]]
    )


def _probability(entry: TokenLogprob) -> TokenProbability:
    return TokenProbability(id=entry.token_id, token=entry.token, bytes=list(entry.raw), logprob=entry.logprob)
