"""How long an answer takes, in the numbers of llama.cpp's server."""

from __future__ import annotations

import time

from common.generation import Prefill, Usage
from endpoints.LlamaCpp.types.response import Timings
from endpoints.OAI.types.common import PromptProgress
from endpoints.OAI.utils.generation import prompt_progress


class Stopwatch:
    """What is known of an answer's usage before its end, which brings the engine's own figures.

    Attributes:
        prompt_tokens: known from `start()` on.
        completion_tokens: those so far.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._cached_tokens = 0
        self._started = self._answered = time.monotonic()

    def start(self, prompt_tokens: int) -> None:
        """The engine has taken the prompt."""
        self.prompt_tokens = prompt_tokens
        self._started = time.monotonic()

    def prefill(self, index: int, event: Prefill) -> PromptProgress:
        self._cached_tokens = event.cached_tokens
        return prompt_progress(index, event, time.monotonic() - self._started)

    def count(self, tokens: int) -> None:
        """Tokens of the answer have come."""
        if self.completion_tokens == 0:
            self._answered = time.monotonic()
        self.completion_tokens += tokens

    def usage(self) -> Usage:
        """So far, once the answer has begun."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self._cached_tokens,
            prompt_seconds=self._answered - self._started,
            completion_seconds=time.monotonic() - self._answered,
        )


def timings(usage: Usage) -> Timings:
    processed = usage.prompt_tokens - usage.cached_tokens
    drafted = usage.accepted_draft_tokens + usage.rejected_draft_tokens
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=processed,
        prompt_ms=_milliseconds(usage.prompt_seconds),
        prompt_per_token_ms=_milliseconds(_ratio(usage.prompt_seconds, processed)),
        prompt_per_second=_ratio(processed, usage.prompt_seconds),
        predicted_n=usage.completion_tokens,
        predicted_ms=_milliseconds(usage.completion_seconds),
        predicted_per_token_ms=_milliseconds(_ratio(usage.completion_seconds, usage.completion_tokens)),
        predicted_per_second=_ratio(usage.completion_tokens, usage.completion_seconds),
        draft_n=drafted or None,
        draft_n_accepted=usage.accepted_draft_tokens if drafted else None,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ratio(number: float, by: float) -> float:
    return round(number / by, 6) if by > 0 else 0.0
