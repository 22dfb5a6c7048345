"""Text completions: request -> generation requests, events -> pieces of answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from backends.messages import ControlToken
from common.boundaries import check_boundaries
from common.errors import InvalidRequest
from common.fim import fim_prompt
from common.generation import Constraint, Echo, Event, Finish, GenerationRequest, TextDelta
from endpoints.OAI.types.common import Envelope, PromptProgress, Usage
from endpoints.OAI.types.completion import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Prompt
from endpoints.OAI.utils.generation import Codec, check_answers, generation_requests, how_it_ended, most_logprobs
from endpoints.OAI.utils.logprobs import LogprobLists, prompt_entries


def completion_generation_requests(
    body: CompletionRequest, constraints: Sequence[Constraint] = (), control_tokens: Sequence[ControlToken] = ()
) -> list[GenerationRequest]:
    """The requests for each prompt, in order. Raises `InvalidRequest` for what cannot be served as it is."""
    _check(body)
    logprobs = most_logprobs(_logprobs(body), body.prompt_logprobs)
    if logprobs is None and body.per_prompt > body.n:
        logprobs = 0  # to rank the answers by
    # Evaluation tools ask so for nothing but the log-probabilities of a prompt. Without echo, 0 is no limit.
    prompt_only = body.echo and body.max_tokens == 0 and "max_tokens" in body.model_fields_set
    return [
        request
        for prompt in body.prompt
        for request in generation_requests(
            _with_suffix(prompt, body.suffix, control_tokens),
            body,
            count=body.per_prompt,
            logprobs=logprobs,
            constraints=constraints,
            add_bos=body.add_bos_token,
            echo=body.echo or body.prompt_logprobs is not None,
            prompt_only=prompt_only,
            cache_boundaries=sorted(set(body.cache_boundaries)),
        )
    ]


def _check(body: CompletionRequest) -> None:
    check_answers(len(body.prompt), body.per_prompt, "n" if body.best_of is None else "best_of")
    if body.per_prompt < body.n:
        raise InvalidRequest(f"best_of ({body.best_of}) must not be smaller than n ({body.n}).", param="best_of")
    if body.stream and body.per_prompt > body.n:
        raise InvalidRequest(
            f"best_of ({body.best_of}) larger than n ({body.n}) cannot be streamed: answers are ranked at their end.",
            param="best_of",
        )
    if body.suffix and body.echo:
        raise InvalidRequest("echo cannot be combined with suffix.", param="echo")
    if body.suffix and body.cache_boundaries:
        raise InvalidRequest("cache_boundaries cannot be combined with suffix.", param="cache_boundaries")
    for prompt in body.prompt:
        unit = "characters" if isinstance(prompt, str) else "tokens"
        check_boundaries(body.cache_boundaries, 0, len(prompt), f"{unit} from the beginning of the prompt")


def _with_suffix(prompt: Prompt, suffix: str | None, control_tokens: Sequence[ControlToken]) -> Prompt:
    if not suffix:
        return prompt
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix needs a prompt that is text, not token ids.", param="suffix")
    return fim_prompt(prompt, suffix, control_tokens)


def _logprobs(body: CompletionRequest) -> int | None:
    """How many alternatives to report for each token; None for no log-probabilities. 0 counts as a number here."""
    if body.logprobs is None or body.logprobs is False:
        return body.n_probs or None
    return body.top_logprobs or (0 if body.logprobs is True else body.logprobs)


class CompletionCodec(Codec[CompletionChoice, Completion, Completion]):
    """Renders the answers to one text completion."""

    def __init__(self, envelope: Envelope, body: CompletionRequest) -> None:
        super().__init__(envelope, body, body.per_prompt)
        self._n = body.n
        self._echo = body.echo
        self._prompt_logprobs = body.prompt_logprobs
        logprobs = _logprobs(body)
        self._with_logprobs = logprobs is not None
        self._lists: defaultdict[int, LogprobLists] = defaultdict(lambda: LogprobLists(logprobs or 0))
        self._sampled: defaultdict[int, list[float]] = defaultdict(list)  # log-probabilities of an answer's tokens

    def pieces(self, index: int, event: Event) -> Iterator[CompletionChoice]:
        if isinstance(event, Finish):
            yield CompletionChoice(index=index, text="", **how_it_ended(event))
        elif isinstance(event, Echo):
            yield CompletionChoice(
                index=index,
                text=event.text if self._echo else "",
                logprobs=self._lists[index].prompt(event) if self._echo and self._with_logprobs else None,
                prompt_logprobs=None if self._prompt_logprobs is None else prompt_entries(event, self._prompt_logprobs),
            )
        elif isinstance(event, TextDelta):
            self._sampled[index] += [entry.logprob for entry in event.logprobs]
            logprobs = self._lists[index].answer(event) if self._with_logprobs else None
            if event.text or logprobs:
                yield CompletionChoice(index=index, text=event.text, logprobs=logprobs)

    def chunk(
        self, choices: list[CompletionChoice], *, usage: Usage | None = None, progress: PromptProgress | None = None
    ) -> Completion:
        return Completion(**self._head, choices=choices, usage=usage, prompt_progress=progress)

    def whole(self, answers: Sequence[Sequence[CompletionChoice]], usage: Usage) -> Completion:
        kept = [index for first in range(0, len(answers), self._per_prompt) for index in self._best(first)]
        choices = [self._joined(place, answers[index]) for place, index in enumerate(kept)]
        return Completion(**self._head, choices=choices, usage=usage)

    def _joined(self, index: int, pieces: Sequence[CompletionChoice]) -> CompletionChoice:
        logprobs = CompletionLogprobs() if self._with_logprobs else None
        for piece in pieces:
            if logprobs is not None and piece.logprobs is not None:
                logprobs.extend(piece.logprobs)
        text = "".join(piece.text for piece in pieces)
        prompt_logprobs = pieces[0].prompt_logprobs
        return pieces[-1].model_copy(
            update={"index": index, "text": text, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        )

    def _best(self, first: int) -> list[int]:
        """Of the answers to a prompt, of which the first is given, the n most likely, best first."""
        indices = range(first, first + self._per_prompt)
        if self._n == self._per_prompt:
            return list(indices)
        return sorted(indices, key=self._mean_logprob, reverse=True)[: self._n]

    def _mean_logprob(self, index: int) -> float:
        sampled = self._sampled[index]
        return sum(sampled) / len(sampled) if sampled else -math.inf
