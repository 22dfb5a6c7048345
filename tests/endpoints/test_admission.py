from __future__ import annotations

import asyncio

import pytest

from common.caching import EVERYBODY
from common.config_models import NetworkConfig
from common.errors import QueueTimeout, RequestCancelled, ServerBusy, TooManyRequests
from common.metrics import Metrics
from endpoints import admission
from endpoints.admission import Place, RequestQueue

STOP = RequestCancelled("stop")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def queue_of(metrics: Metrics, **network: int) -> RequestQueue:
    return RequestQueue(NetworkConfig.model_validate(network), metrics)


def waiting(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("waypoint_requests_waiting")


async def test_places_come_free_when_requests_begin_end_or_fail(metrics: Metrics) -> None:
    queue = queue_of(metrics, max_queue=1)
    for free in (Place.begin, Place.leave, lambda place: place.fail(STOP)):
        place = queue.enter("a")
        with pytest.raises(ServerBusy):
            queue.enter("b")
        free(place)
        assert waiting(metrics) == 0
    place = queue.enter("a")
    place.begin()
    place.begin()
    place.leave()
    assert waiting(metrics) == 0


async def test_what_is_told_of_the_queue_and_of_an_end(metrics: Metrics) -> None:
    queue = queue_of(metrics)
    ended: list[str] = []
    first, second = queue.enter("a"), queue.enter("b")
    first.on_leave = lambda: ended.append("a")
    first.begin()
    assert (queue.waiting, queue.in_flight, ended) == (1, 2, [])
    first.leave()
    second.leave()
    assert (queue.waiting, queue.in_flight, ended) == (0, 0, ["a"])


async def test_each_key_has_its_own_bound_but_an_administrator(metrics: Metrics) -> None:
    queue = queue_of(metrics, max_queue_per_key=1)
    queue.enter("a")
    queue.enter("b")
    for owner in "ab":
        with pytest.raises(TooManyRequests):
            queue.enter(owner)
    for _ in range(3):
        queue.enter(EVERYBODY)
    assert waiting(metrics) == 5


async def test_0_is_no_limit(metrics: Metrics) -> None:
    queue = queue_of(metrics, max_queue=0, max_queue_per_key=0, queue_timeout=0)
    places = [queue.enter("a") for _ in range(1000)]
    for place in places:
        place.leave()


@pytest.mark.parametrize(("now", "seconds"), [(100.0, 1), (112.0, 3), (10_000.0, 60)])
async def test_retry_after_follows_the_pace(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, now: float, seconds: int
) -> None:
    queue = queue_of(metrics, max_queue=1)
    clock = 100.0
    monkeypatch.setattr(admission, "monotonic", lambda: clock)
    queue.enter("a")
    with pytest.raises(ServerBusy) as unknown:
        queue.enter("a")
    assert unknown.value.retry_after == ServerBusy.retry_after
    queue.end_all(STOP)
    for begun in (100.0, 101.0, 102.0, 103.0, 104.0):
        clock = begun
        queue.enter("a").begin()
    clock = max(now, clock)
    queue.enter("a")
    with pytest.raises(ServerBusy) as known:
        queue.enter("a")
    assert known.value.retry_after == seconds


async def test_a_handler_is_cancelled_with_the_reason(metrics: Metrics) -> None:
    queue = queue_of(metrics)
    cleaned_up = False

    async def handler() -> None:
        nonlocal cleaned_up
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up = True

    place = queue.enter("a")
    asyncio.get_running_loop().call_soon(queue.end_all, STOP)
    with pytest.raises(RequestCancelled) as raised:
        await place.hold(handler())
    assert raised.value is STOP
    assert cleaned_up
    place.fail(QueueTimeout("later"))  # changes nothing
    place.leave()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_what_a_handler_raises_is_raised(metrics: Metrics) -> None:
    async def handler() -> None:
        raise TimeoutError("of its own")

    place = queue_of(metrics).enter("a")
    with pytest.raises(TimeoutError, match="of its own"):
        await place.hold(handler())
    assert waiting(metrics) == 0


async def test_after_the_handler_whoever_took_over_is_told(metrics: Metrics) -> None:
    told: list[Exception] = []
    queue = queue_of(metrics)
    streaming, ended = queue.enter("a"), queue.enter("b")

    async def stream() -> str:
        streaming.hand_over(told.append)
        return "response"

    assert await streaming.hold(stream()) == "response"
    await ended.hold(asyncio.sleep(0))
    queue.end_all(STOP)
    assert told == [STOP]
