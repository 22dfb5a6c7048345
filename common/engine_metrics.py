"""What the engine of the loaded model holds, as Prometheus metrics.

An engine counts from 0 in each process, and answers only between two steps. So its counters are added up here, across
restarts and swaps of models, and its gauges are those of the last state that it has told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Final, Literal, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.caching import CacheState, CheckpointsState, TierState

NAMESPACE: Final = "waypoint"

Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = tuple[Labels, float]


class EngineFamily(NamedTuple):
    """A metric and its samples in what an engine says.

    Attributes:
        name: in full, without the `_total` of a counter.
    """

    name: str
    type: Literal["gauge", "counter"]
    description: str
    labels: Labels
    read: Callable[[CacheState], Iterable[Sample]]

    def with_samples(self, samples: Iterable[Sample]) -> Metric:
        make = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        family = make(self.name, self.description, labels=self.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family


class LoadedModel(NamedTuple):
    """The model in an engine process.

    Attributes:
        process: another object for each process.
    """

    process: object
    name: str
    architecture: str
    device: str


class EngineMetrics(Collector):
    """Without a model, and until its engine has answered for the first time, there are no gauges."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._state: CacheState | None = None
        self._told_at = 0.0
        self._counted: dict[tuple[str, Labels], float] = {}  # as the process has told it
        self._totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)  # of all processes

    def set_model(self, model: LoadedModel) -> None:
        """Say which model is loaded, and in which process. What another one has told is no longer shown."""
        if self._model is None or model.process is not self._model.process:
            self.forget()
        self._model = model

    def set_state(self, process: object, state: CacheState) -> None:
        """Take in what the engine in a process tells; nothing where another process has taken its place."""
        if self._model is None or process is not self._model.process:
            return
        self._state, self._told_at = state, monotonic()
        for family in FAMILIES:
            if family.type == "counter":
                for labels, value in family.read(state):
                    self._count_up((family.name, labels), value)

    def forget(self) -> None:
        """There is no model, or its process has ended."""
        self._model = self._state = None
        self._counted.clear()

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            if samples := list(self._samples(family)):
                yield family.with_samples(samples)

    def _samples(self, family: EngineFamily) -> Iterable[Sample]:
        if family.type == "counter":
            return [(labels, value) for (name, labels), value in self._totals.items() if name == family.name]
        if family is MODEL_INFO:
            return (
                [] if self._model is None else [((self._model.name, self._model.architecture, self._model.device), 1)]
            )
        if self._state is None:
            return []
        return [((), monotonic() - self._told_at)] if family is STATE_AGE else family.read(self._state)

    def _count_up(self, key: tuple[str, Labels], value: float) -> None:
        counted = self._counted.get(key, 0)
        # Less than before: the engine has begun to count anew.
        self._totals[key] += value - counted if value >= counted else value
        self._counted[key] = value


# --- the families -------------------------------------------------------------------------------------------------


def _nothing(state: CacheState) -> Iterable[Sample]:
    return ()


def _of_tiers(
    name: str, type: Literal["gauge", "counter"], description: str, value: Callable[[TierState], int]
) -> EngineFamily:
    def read(state: CacheState) -> Iterable[Sample]:
        return [((tier.tier,), value(tier)) for tier in state.tiers]

    return EngineFamily(f"{NAMESPACE}_{name}", type, description, ("tier",), read)


def _of_checkpoints(
    name: str,
    type: Literal["gauge", "counter"],
    description: str,
    samples: Callable[[CheckpointsState], Iterable[Sample]],
    labels: Labels = (),
) -> EngineFamily:
    def read(state: CacheState) -> Iterable[Sample]:
        return () if state.checkpoints is None else samples(state.checkpoints)

    return EngineFamily(f"{NAMESPACE}_{name}", type, description, labels, read)


def _held(checkpoints: CheckpointsState) -> Iterator[Sample]:
    held = Counter((entry.tier, entry.usable, entry.boundary) for entry in checkpoints.entries)
    for tier in ("ram", "disk"):
        for usable in (True, False):
            for boundary in (True, False):
                yield (tier, _word(usable), _word(boundary)), held[tier, usable, boundary]


def _evicted(checkpoints: CheckpointsState) -> Iterator[Sample]:
    yield (_word(True),), checkpoints.evictions_usable
    yield (_word(False),), checkpoints.evictions - checkpoints.evictions_usable


def _word(value: bool) -> str:
    return str(value).lower()


MODEL_INFO: Final = EngineFamily(
    f"{NAMESPACE}_model_info",
    "gauge",
    "1, with the loaded model in its labels.",
    ("name", "architecture", "device"),
    _nothing,
)
STATE_AGE: Final = EngineFamily(
    f"{NAMESPACE}_cache_state_age_seconds",
    "gauge",
    "Since the engine has told what the metrics of its cache and checkpoints say. It tells nothing during a chunk of "
    "prefill.",
    (),
    _nothing,
)
FAMILIES: Final = (
    MODEL_INFO,
    STATE_AGE,
    _of_tiers("cache_capacity_tokens", "gauge", "Tokens that a tier has room for.", lambda tier: tier.capacity_tokens),
    _of_tiers("cache_capacity_bytes", "gauge", "Bytes that a tier has room for.", lambda tier: tier.capacity_bytes),
    _of_tiers(
        "cache_used_tokens",
        "gauge",
        "Tokens in complete pages of a tier, with which a prompt can be resumed.",
        lambda tier: tier.used_tokens,
    ),
    _of_tiers("cache_used_bytes", "gauge", "Bytes of those pages.", lambda tier: tier.used_bytes),
    _of_tiers(
        "cache_active_tokens", "gauge", "Tokens in pages that running answers hold.", lambda tier: tier.active_tokens
    ),
    _of_tiers("cache_hit_tokens", "counter", "Tokens that came from a tier.", lambda tier: tier.hit_tokens),
    _of_tiers(
        "cache_evicted_tokens",
        "counter",
        "Tokens of complete pages that were dropped from a tier to make room.",
        lambda tier: tier.evicted_tokens,
    ),
    _of_checkpoints(
        "checkpoints",
        "gauge",
        "Recurrent checkpoints, by where they are, whether a prompt can be resumed from them, and whether they are at "
        "the end of a system prompt or a message.",
        _held,
        ("tier", "usable", "boundary"),
    ),
    _of_checkpoints(
        "checkpoints_capacity",
        "gauge",
        "Checkpoints that memory.sysmem_recurrent_cache has room for.",
        lambda checkpoints: [((), checkpoints.capacity)],
    ),
    _of_checkpoints(
        "checkpoints_used_bytes",
        "gauge",
        "Bytes of the checkpoints in host RAM.",
        lambda checkpoints: [((), checkpoints.used_bytes)],
    ),
    _of_checkpoints(
        "checkpoints_capacity_bytes",
        "gauge",
        "Bytes that they may take, which is memory.sysmem_recurrent_cache.",
        lambda checkpoints: [((), checkpoints.capacity_bytes)],
    ),
    _of_checkpoints(
        "checkpoint_size_bytes",
        "gauge",
        "Bytes of one checkpoint.",
        lambda checkpoints: [((), checkpoints.checkpoint_bytes)],
    ),
    _of_checkpoints(
        "checkpoint_hits",
        "counter",
        "Prompts that were resumed from a checkpoint.",
        lambda checkpoints: [((), checkpoints.hits)],
    ),
    _of_checkpoints(
        "checkpoint_evictions",
        "counter",
        "Checkpoints that were dropped because memory.sysmem_recurrent_cache was full, and whether a prompt could have "
        "been resumed from them.",
        _evicted,
        ("usable",),
    ),
    _of_checkpoints(
        "checkpoints_pruned",
        "counter",
        "Checkpoints that were dropped while idle because nothing could be resumed from them any more.",
        lambda checkpoints: [((), checkpoints.pruned)],
    ),
)
