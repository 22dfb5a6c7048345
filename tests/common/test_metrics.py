"""The metrics of a server, in a registry of their own."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from common.generation import Usage
from common.metrics import Metrics


def sources(metrics: Metrics) -> dict[str, float | None]:
    return {
        source: metrics.registry.get_sample_value("waypoint_prompt_tokens_total", {"source": source})
        for source in ("vram", "ram", "disk", "replayed", "new")
    }


def test_two_servers_of_a_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.count_load(True)
    loads = [
        metrics.registry.get_sample_value("waypoint_model_loads_total", {"outcome": "loaded"})
        for metrics in (one, other)
    ]
    assert loads == [1, 0]
    assert REGISTRY.get_sample_value("waypoint_model_loads_total", {"outcome": "loaded"}) is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(prompt_tokens=10, completion_tokens=1), (0, 0, 0, 0, 10)),
        (Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=256, matched_tokens=512), (256, 0, 0, 256, 488)),
        (
            Usage(
                prompt_tokens=2000,
                completion_tokens=1,
                cached_tokens=1280,
                matched_tokens=1280,
                ram_tokens=512,
                disk_tokens=256,
            ),
            (512, 512, 256, 0, 720),
        ),
        # Of an engine that tells only what it resumed from.
        (Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=256), (256, 0, 0, 0, 744)),
    ],
)
def test_every_prompt_token_has_one_source(usage: Usage, expected: tuple[int, ...]) -> None:
    metrics = Metrics()
    metrics.count_usage(usage)
    assert tuple(sources(metrics).values()) == expected
    assert sum(expected) == usage.prompt_tokens


def test_drafts_and_thoughts_are_counted() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.count_usage(
            Usage(
                prompt_tokens=1,
                completion_tokens=9,
                reasoning_tokens=4,
                accepted_draft_tokens=3,
                rejected_draft_tokens=2,
            )
        )
    value = metrics.registry.get_sample_value
    assert value("waypoint_reasoning_tokens_total") == 8
    assert value("waypoint_draft_tokens_total", {"outcome": "accepted"}) == 6
    assert value("waypoint_draft_tokens_total", {"outcome": "rejected"}) == 4


def test_loads_and_restarts_are_counted_by_their_outcome() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    for works in (True, False, False):
        metrics.count_load(works)
        metrics.count_restart(works)
    for name, good in (("waypoint_model_loads_total", "loaded"), ("waypoint_engine_restarts_total", "back")):
        assert [value(name, {"outcome": outcome}) for outcome in (good, "failed")] == [1, 2]


def test_every_metric_is_listed_once_with_its_unit() -> None:
    metrics = Metrics()
    names = [family.name for family in metrics.families]
    assert len(set(names)) == len(names)
    suffix = {"counter": "_total", "info": "_info"}
    collected = {f"{metric.name}{suffix.get(metric.type, '')}" for metric in metrics.registry.collect()}
    assert collected <= set(names)
    for family in metrics.families:
        assert family.name.startswith("waypoint_")
        assert family.name.endswith("_total") == (family.type == "counter")
        assert family.name.endswith("_seconds") or family.type != "histogram"
        assert family.description.endswith(".")
