"""What the server counts and measures, as Prometheus metrics in a registry of its own.

An *answer* is what the engine generates for a prompt; a request with `n` 2 has two of them, which count one by one.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from common.caching import TierName
from common.engine_metrics import FAMILIES, NAMESPACE, EngineMetrics, Labels
from common.errors import QueueTimeout, ServerBusy, TooManyRequests
from common.generation import Usage
from common.version import VERSION

# Where the tokens of a prompt come from.
PromptSource: TypeAlias = Literal[TierName, "replayed", "new"]

# Seconds. A long prompt takes a home GPU a minute, and the next one waits as long; an answer may take many.
WAIT_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300)
TOKEN_BUCKETS: Final = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
ANSWER_BUCKETS: Final = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)

# Else each counter and histogram brings a second family, of when it was made. It is one switch for the whole process.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's signature lacks its return type


class Family(NamedTuple):
    """What there is to say of a metric. Its name is the one that queries use."""

    name: str
    type: str
    labels: Labels
    description: str


class Metrics:
    """The metrics of one server.

    Attributes:
        registry: has all of them.
        families: what they are, in the order of `registry`.
        engine: those that come from the engine.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.families: list[Family] = []

        self._gauge("build_info", "1, with the version of Waypoint in its label.", "version").labels(VERSION).set(1)

        # requests and answers
        self.requests = self._counter("requests", "Requests for answers.", "endpoint")
        self.answers = self._counter(
            "answers",
            "Answers that have ended, by how: the finish reason stop, length or tool_calls; cancelled, as the client "
            "has gone; or the code of the error with which their request has ended.",
            "endpoint",
            "outcome",
        )
        self.http_errors = self._counter(
            "http_errors",
            "Responses that are an error, of any route, by its code. One inside a stream is in waypoint_answers_total "
            "only.",
            "route",
            "code",
        )
        self.requests_waiting = self._gauge(
            "requests_waiting",
            "Requests in the queue: those that network.max_queue bounds, before an answer has begun.",
        )
        self.requests_refused = self._counter(
            "requests_refused",
            "Requests that were not served as too many waited, by the code of the error: server_busy, "
            "rate_limit_exceeded, or queue_timeout after network.queue_timeout.",
            "code",
        )
        self.waiting = self._gauge(
            "answers_waiting", "Answers whose prompt is in the queue, or of which the first chunk is not done."
        )
        self.running = self._gauge("answers_running", "Answers that the engine works on.")

        # time
        self._queue_time = self._histogram(
            "queue_time_seconds", "Time of a prompt in the queue of the engine; of finished answers.", WAIT_BUCKETS
        )
        self._prefill_time = self._histogram(
            "prefill_time_seconds", "Time in which the engine processed a prompt; of finished answers.", WAIT_BUCKETS
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request until the first token of the answer.", WAIT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "From one token to the next. Tokens that come together, as accepted drafts do, share the time since the "
            "token before them.",
            TOKEN_BUCKETS,
        )
        self.answer_time = self._histogram(
            "answer_time_seconds", "From the request until an answer has finished.", ANSWER_BUCKETS
        )

        # tokens
        self._prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens of finished answers, by where they came from: the tiers vram, ram and disk; replayed, which "
            "were cached but past the last checkpoint; new. Those of the last two were processed.",
            "source",
        )
        self.unfinished_prompt_tokens = self._counter(
            "unfinished_prompt_tokens", "Prompt tokens that were processed for answers that have not finished."
        )
        self.generation_tokens = self._counter(
            "generation_tokens", "Generated tokens, those of thoughts and of answers that do not finish included."
        )
        self._reasoning_tokens = self._counter("reasoning_tokens", "Tokens of thoughts in finished answers.")
        self._draft_tokens = self._counter(
            "draft_tokens", "Drafted tokens of finished answers: accepted or rejected.", "outcome"
        )

        # models
        self._loads = self._counter("model_loads", "Loads of a model: loaded or failed.", "outcome")
        self.models_loaded = self._gauge("models_loaded", "Models that are loaded.")
        self._unloads = self._counter(
            "model_unloads",
            "Models that are no longer loaded, by why: displaced, as another one took their room; idle, after "
            "model.idle_timeout; or requested.",
            "reason",
        )
        self._restarts = self._counter(
            "engine_restarts", "Starts of an engine process in place of one that has died: back or failed.", "outcome"
        )
        self.engine = EngineMetrics()
        self.registry.register(self.engine)
        for name, type, description, labels, _ in FAMILIES:
            shown = f"{name}_total" if type == "counter" else name
            self.families.append(Family(shown, type, labels, description))

        # Counters whose labels are known are there from the start, so that the first event is an increase.
        for counter, values in (
            (self._prompt_tokens, get_args(PromptSource)),
            (self._draft_tokens, ("accepted", "rejected")),
            (self._loads, ("loaded", "failed")),
            (self._unloads, ("displaced", "idle", "requested")),
            (self._restarts, ("back", "failed")),
            (self.requests_refused, (ServerBusy.code, TooManyRequests.code, QueueTimeout.code)),
        ):
            for value in values:
                counter.labels(value)

    def count_usage(self, usage: Usage) -> None:
        """Add what a finished answer has used, but for the generated tokens, which count as they come."""
        matched = max(usage.matched_tokens, usage.cached_tokens)
        tokens: dict[PromptSource, int] = {
            "vram": usage.cached_tokens - usage.ram_tokens - usage.disk_tokens,
            "ram": usage.ram_tokens,
            "disk": usage.disk_tokens,
            "replayed": matched - usage.cached_tokens,
            "new": usage.prompt_tokens - matched,
        }
        for source, count in tokens.items():
            self._prompt_tokens.labels(source).inc(count)
        self._queue_time.observe(usage.queue_seconds)
        self._prefill_time.observe(usage.prompt_seconds)
        self._reasoning_tokens.inc(usage.reasoning_tokens)
        self._draft_tokens.labels("accepted").inc(usage.accepted_draft_tokens)
        self._draft_tokens.labels("rejected").inc(usage.rejected_draft_tokens)

    def count_load(self, loaded: bool) -> None:
        self._loads.labels("loaded" if loaded else "failed").inc()

    def count_unload(self, reason: str) -> None:
        self._unloads.labels(reason).inc()

    def count_restart(self, back: bool) -> None:
        self._restarts.labels("back" if back else "failed").inc()

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        self._list(f"{name}_total", "counter", labels, description)
        return Counter(name, description, labels, NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        self._list(name, "gauge", labels, description)
        return Gauge(name, description, labels, NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        self._list(name, "histogram", (), description)
        return Histogram(name, description, (), NAMESPACE, registry=self.registry, buckets=buckets)

    def _list(self, name: str, type: str, labels: Labels, description: str) -> None:
        self.families.append(Family(f"{NAMESPACE}_{name}", type, labels, description))
