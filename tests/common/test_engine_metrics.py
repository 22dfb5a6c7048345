"""Gauges of the last state that an engine has told, counters that go on from process to process."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.caching import CacheState, Checkpoint, CheckpointsState, TierState
from common.engine_metrics import FAMILIES, EngineMetrics, LoadedModel

TIER = TierState(
    tier="vram",
    capacity_tokens=4096,
    capacity_bytes=40960,
    used_tokens=512,
    used_bytes=5120,
    active_tokens=256,
    hit_tokens=1000,
    evicted_tokens=300,
)
MARK = Checkpoint(position=256, bytes=100, age_seconds=1.0, tier="ram", usable=True, boundary=False)
CHECKPOINTS = CheckpointsState(
    capacity_bytes=1000,
    used_bytes=300,
    checkpoint_bytes=100,
    capacity=10,
    hits=5,
    replayed_tokens=700,
    evictions=4,
    evictions_usable=1,
    pruned=2,
    entries=[MARK, MARK, msgspec.structs.replace(MARK, usable=False, boundary=True)],
)
STATE = CacheState(tiers=[TIER], checkpoints=CHECKPOINTS, active_requests=0, queued_requests=0)


class Engine:
    """The metrics of an engine, with a registry to read them from."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)

    def start(self, name: str = "alpha") -> object:
        """A new process."""
        process = object()
        self.metrics.set_model(LoadedModel(process, name, "Llama", "cpu"))
        return process

    def value(self, metric: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"waypoint_{metric}", labels)

    def names(self) -> set[str]:
        return {metric.name for metric in self.registry.collect()}


def counting(hit_tokens: int, evictions: int = 0, evictions_usable: int = 0) -> CacheState:
    checkpoints = msgspec.structs.replace(CHECKPOINTS, evictions=evictions, evictions_usable=evictions_usable)
    return msgspec.structs.replace(
        STATE, tiers=[msgspec.structs.replace(TIER, hit_tokens=hit_tokens)], checkpoints=checkpoints
    )


def test_what_an_engine_tells_is_shown() -> None:
    engine = Engine()
    engine.metrics.set_state(engine.start(), STATE)
    assert engine.value("model_info", name="alpha", architecture="Llama", device="cpu") == 1
    assert engine.value("cache_capacity_tokens", tier="vram") == 4096
    assert engine.value("cache_capacity_bytes", tier="vram") == 40960
    assert engine.value("cache_used_tokens", tier="vram") == 512
    assert engine.value("cache_used_bytes", tier="vram") == 5120
    assert engine.value("cache_active_tokens", tier="vram") == 256
    assert engine.value("cache_hit_tokens_total", tier="vram") == 1000
    assert engine.value("cache_evicted_tokens_total", tier="vram") == 300
    assert engine.value("checkpoints", tier="ram", usable="true", boundary="false") == 2
    assert engine.value("checkpoints", tier="ram", usable="false", boundary="true") == 1
    assert engine.value("checkpoints", tier="disk", usable="true", boundary="false") == 0
    assert engine.value("checkpoints_capacity") == 10
    assert engine.value("checkpoints_used_bytes") == 300
    assert engine.value("checkpoints_capacity_bytes") == 1000
    assert engine.value("checkpoint_size_bytes") == 100
    assert engine.value("checkpoint_hits_total") == 5
    assert engine.value("checkpoint_evictions_total", usable="true") == 1
    assert engine.value("checkpoint_evictions_total", usable="false") == 3
    assert engine.value("checkpoints_pruned_total") == 2
    assert engine.names() == {family.name for family in FAMILIES}


def test_without_an_answer_there_is_only_the_model() -> None:
    engine = Engine()
    assert engine.names() == set()
    engine.start()
    assert engine.names() == {"waypoint_model_info"}


def test_without_recurrent_layers_there_are_no_checkpoints() -> None:
    engine = Engine()
    engine.metrics.set_state(engine.start(), msgspec.structs.replace(STATE, checkpoints=None))
    assert not any("checkpoint" in name for name in engine.names())
    assert engine.value("cache_used_tokens", tier="vram") == 512


@pytest.mark.parametrize("told", [[10, 25, 25, 40], [40], [0, 40]])
def test_what_is_told_again_counts_once(told: list[int]) -> None:
    engine = Engine()
    process = engine.start()
    for hit_tokens in told:
        engine.metrics.set_state(process, counting(hit_tokens))
    assert engine.value("cache_hit_tokens_total", tier="vram") == 40


@pytest.mark.parametrize("after", [7, 10, 30])
def test_counters_go_on_in_the_next_process(after: int) -> None:
    """Also when it has counted as far or further before it is asked for the first time."""
    engine = Engine()
    engine.metrics.set_state(engine.start(), counting(10, evictions=3, evictions_usable=2))
    second = engine.start()
    assert engine.value("cache_hit_tokens_total", tier="vram") == 10
    engine.metrics.set_state(second, counting(after, evictions=2, evictions_usable=1))
    assert engine.value("cache_hit_tokens_total", tier="vram") == 10 + after
    assert engine.value("checkpoint_evictions_total", usable="true") == 3
    assert engine.value("checkpoint_evictions_total", usable="false") == 2


def test_counters_that_begin_anew_within_a_process_go_on() -> None:
    engine = Engine()
    process = engine.start()
    for hit_tokens in (10, 4, 6):
        engine.metrics.set_state(process, counting(hit_tokens))
    assert engine.value("cache_hit_tokens_total", tier="vram") == 16


def test_the_same_process_again_changes_nothing() -> None:
    engine = Engine()
    model = LoadedModel(object(), "alpha", "Llama", "cpu")
    for _ in range(2):
        engine.metrics.set_model(model)
        engine.metrics.set_state(model.process, STATE)
    assert engine.value("cache_hit_tokens_total", tier="vram") == 1000


def test_an_answer_of_a_process_that_has_been_replaced_is_ignored() -> None:
    engine = Engine()
    first = engine.start()
    engine.start("beta")
    engine.metrics.set_state(first, STATE)
    assert engine.names() == {"waypoint_model_info"}
    assert engine.value("model_info", name="beta", architecture="Llama", device="cpu") == 1


def test_without_a_model_only_the_counters_are_left() -> None:
    engine = Engine()
    engine.metrics.set_state(engine.start(), STATE)
    engine.metrics.forget()
    assert engine.names() == {family.name for family in FAMILIES if family.type == "counter"}
    assert engine.value("cache_hit_tokens_total", tier="vram") == 1000
