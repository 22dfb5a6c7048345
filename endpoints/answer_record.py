"""One answer from its request to its end: measured as its events come, told in one line of the log."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from loguru import logger

from common.generation import Event, Finish, Prefill, TextDelta
from common.metrics import Metrics

CANCELLED: Final = "cancelled"


class AnswerRecord:
    """
    Attributes:
        finish: the last event, once it has come.

    Args:
        endpoint: path of the route that was asked, without a prefix.
        on_begin: called with the first event.
    """

    def __init__(self, metrics: Metrics, endpoint: str, on_begin: Callable[[], None] = lambda: None) -> None:
        self.finish: Finish | None = None
        self._metrics = metrics
        self._endpoint = endpoint
        self._on_begin = on_begin
        self._asked_at = monotonic()
        self._prompt_tokens: int | None = None  # None: the engine has not taken the prompt
        self._begun = False
        self._prefill = Prefill(done_tokens=0, total_tokens=0)
        self._token_at: float | None = None  # when the last one came
        self._generated = 0
        self._ended = False
        metrics.waiting.inc()

    def accepted(self, prompt_tokens: int) -> None:
        """The engine has taken the prompt."""
        self._prompt_tokens = prompt_tokens

    def received(self, event: Event) -> None:
        """To be called for each event as soon as it is there. What comes after the end is not measured."""
        if self._ended:
            return
        now = monotonic()
        if not self._begun:
            self._begun = True
            self._on_begin()
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        match event:
            case Prefill():
                self._prefill = event
            case TextDelta(token_ids=[_, *_]):
                self._count_tokens(len(event.token_ids), now)
            case Finish(usage=usage):
                self.finish = event
                self._metrics.running.dec()
                self._metrics.answer_time.observe(now - self._asked_at)
                self._metrics.count_usage(usage)
                # Those that end an answer without being part of it.
                self._metrics.generation_tokens.inc(max(0, usage.completion_tokens - self._generated))

    def _count_tokens(self, count: int, now: float) -> None:
        if self._token_at is None:
            self._metrics.time_to_first_token.observe(now - self._asked_at)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._token_at) / count)
        self._token_at = now
        self._generated += count
        self._metrics.generation_tokens.inc(count)

    def end(self, outcome: str) -> None:
        """Nothing more comes of it. Only the first call counts.

        Args:
            outcome: the finish reason that the client is told, `CANCELLED`, or the code of an error.
        """
        if self._ended:
            return
        self._ended = True
        self._metrics.answers.labels(self._endpoint, outcome).inc()
        if self.finish is not None:
            _log_finish(self.finish)
            return
        (self._metrics.running if self._begun else self._metrics.waiting).dec()
        self._metrics.unfinished_prompt_tokens.inc(self._prefilled - self._prefill.cached_tokens)
        if self._prompt_tokens is not None:
            logger.info(
                "Ended after {:.2f} s ({}); prompt {} tokens: resumed {}, prefilled to {}; generated {} tokens",
                monotonic() - self._asked_at,
                outcome,
                self._prompt_tokens,
                self._prefill.cached_tokens,
                self._prefilled,
                self._generated,
            )

    @property
    def _prefilled(self) -> int:
        """Prompt tokens that are done, the cached ones included."""
        all_done = self._prompt_tokens if self._token_at is not None else None
        return max(self._prefill.done_tokens, all_done or 0)


def _log_finish(finish: Finish) -> None:
    usage = finish.usage
    logger.info(
        "Generated {} tokens in {:.2f} s ({}); prompt {} tokens: matched {}, resumed {} ({} from RAM, {} from disk), "
        "replayed {}, processed {} in {:.2f} s after {:.2f} s in the queue",
        usage.completion_tokens,
        usage.completion_seconds,
        finish.eos_reason or finish.reason,
        usage.prompt_tokens,
        usage.matched_tokens,
        usage.cached_tokens,
        usage.ram_tokens,
        usage.disk_tokens,
        usage.matched_tokens - usage.cached_tokens,
        usage.prompt_tokens - usage.cached_tokens,
        usage.prompt_seconds,
        usage.queue_seconds,
    )
