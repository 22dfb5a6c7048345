"""Which generations a client can ask about and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.requests import Request

from common.config_models import NetworkConfig
from common.errors import ServerError
from common.metrics import Metrics
from endpoints.admission import Place, RequestQueue
from endpoints.Kobold.utils import generations as module
from endpoints.Kobold.utils.generations import KEPT_SECONDS, MAX_KEPT, Generations, Owner

pytestmark = pytest.mark.anyio

OWNER = Owner("key", "")
OTHER = Owner("other", "")


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(NetworkConfig(queue_timeout=0), Metrics())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return iter([now])


def enter(queue: RequestQueue) -> tuple[Place, list[ServerError]]:
    place = queue.enter("")
    failures: list[ServerError] = []
    place.hand_over(failures.append)
    return place, failures


def request(owner: str, host: str) -> Request:
    return Request({"type": "http", "client": (host, 5), "state": {"owner": owner}})


async def test_whose_a_generation_is() -> None:
    assert Owner.of(request("key", "10.0.0.1")) == Owner.of(request("key", "10.0.0.2"))
    # Without keys, or with the administrator's, clients are told apart by where they are.
    assert Owner.of(request("", "10.0.0.1")) == Owner.of(request("", "10.0.0.1"))
    assert Owner.of(request("", "10.0.0.1")) != Owner.of(request("", "10.0.0.2"))


async def test_an_abort_ends_all_of_its_owner_and_key_that_run(queue: RequestQueue) -> None:
    generations = Generations()
    ours, others, ended = [enter(queue) for _ in range(2)], [enter(queue) for _ in range(2)], enter(queue)
    for place, _ in ours:
        generations.begin(OWNER, "k", place)
    generations.begin(OTHER, "k", others[0][0])
    generations.begin(OWNER, "", others[1][0])
    generations.begin(OWNER, "k", ended[0])
    ended[0].leave()
    generations.abort(OWNER, "k")
    assert [len(failures) for _, failures in [*ours, *others, ended]] == [1, 1, 0, 0, 0]


async def test_ended_ones_are_kept_for_a_while(queue: RequestQueue, clock: Iterator[list[float]]) -> None:
    [now] = clock
    generations = Generations()
    running = generations.begin(OWNER, "runs", enter(queue)[0])
    place, _ = enter(queue)
    ended = generations.begin(OWNER, "k", place)
    place.leave()
    now[0] += KEPT_SECONDS
    assert generations.last(OWNER, "k") is ended
    now[0] += 1
    assert generations.last(OWNER, "k") is None
    assert generations.last(OWNER, "runs") is running


async def test_the_oldest_go_first(queue: RequestQueue) -> None:
    generations = Generations()
    for index in range(MAX_KEPT + 2):
        place, _ = enter(queue)
        generations.begin(OWNER, str(index), place)
        place.leave()
    kept = [index for index in range(MAX_KEPT + 2) if generations.last(OWNER, str(index)) is not None]
    assert kept == list(range(2, MAX_KEPT + 2))


async def test_the_next_of_a_key_replaces_the_last(queue: RequestQueue) -> None:
    generations = Generations()
    first = enter(queue)[0]
    generations.begin(OWNER, "", first).add(0, "first")
    first.leave()
    second = generations.begin(OWNER, "", enter(queue)[0])
    assert generations.last(OWNER, "") is second
    assert second.texts() == [""]
    assert generations.last_of(OWNER) is second
    assert generations.last_of(OTHER) is None


async def test_texts_of_several_answers(queue: RequestQueue) -> None:
    generation = Generations().begin(OWNER, "", enter(queue)[0])
    generation.add(1, "b")
    generation.add(0, "a")
    generation.add(1, "c")
    assert generation.texts() == ["a", "bc"]
