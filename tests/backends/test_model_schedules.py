"""Whatever happens in whatever order, no request is answered by another model, cut off or left waiting.

Requests, loads, unloads, crashes and clients that leave, in orders that a seed makes up, over clients that need no
process. What must hold at all times is looked at after every step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

from backends.client import EngineClient
from backends.manager import ModelManager, Wanted
from backends.messages import LoadProgress
from backends.residents import MB
from common.config_models import LoadSettings, ModelSelection
from common.errors import ModelLoadFailed, ModelNotFound, ModelNotLoaded, RequestCancelled
from tests.scripted import load_settings

FOLDER = Path("models").absolute()
SIZES = {"alpha": 1, "beta": 2, "gamma": 3, "delta": 4}  # MB
NAMES = tuple(SIZES)
STEPS = 50_000  # after which something waits for ever


class World:
    """What a schedule is about, and who may cut whom off.

    Attributes:
        holders: requests that work with a client.
        weights: clients whose weights take memory.
        forced: changes under way that wait for no request.
        cut_off: clients that were closed during such a change.
        robbed: names of models that were closed in other times, though requests worked with them.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.models = self.random.randint(1, 3)
        self.memory = self.random.choice([None, 4, 6])
        self.holders: Counter[EngineClient] = Counter()
        self.weights: set[EngineClient] = set()
        self.forced = 0
        self.cut_off: set[EngineClient] = set()
        self.robbed: list[str] = []
        selection = ModelSelection(max_models=self.models, memory_budget=self.memory)
        self.manager = ModelManager(FOLDER, selection=selection)

    async def pause(self, most: int = 3) -> None:
        for _ in range(self.random.randint(0, most)):
            await asyncio.sleep(0)

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def check(self) -> None:
        manager = self.manager
        assert not self.robbed, "a model that was taken from a request"
        assert len(self.weights) <= self.models, "more models than may be up"
        if self.memory is not None:
            assert sum(SIZES[client.name] for client in self.weights) <= self.memory, "more memory than there is"
        for resident in manager._residents.values():
            assert resident._leases >= self.holders[resident.client], "a lease that is lost"
            is_gone = resident.failed or manager._closed  # and nobody is given it
            assert is_gone or resident.client in self.weights, "a model that is up without its weights"
            assert not resident.closing or manager._loading is not None, "closing for nobody"


class ShakyClient(EngineClient):
    """Takes its time, and fails now and then."""

    world: ClassVar[World]

    async def prepare(self) -> None:
        await self.world.pause()
        self.memory = SIZES[self.name] * MB
        self._may_fail("unfit")

    async def check_prepared(self) -> None:
        self._may_fail("died meanwhile")

    async def load(self) -> AsyncIterator[LoadProgress]:
        self.world.weights.add(self)
        await self.world.pause()
        yield LoadProgress(component="model", module=1, modules=1)
        self._may_fail("torn")
        self._is_ready()

    async def close(self, force: bool = False) -> None:
        world = self.world
        if world.forced:
            world.cut_off.add(self)
        elif world.holders[self]:
            world.robbed.append(self.name)
        self.state = "closed"
        await world.pause()
        await super().close(force)
        world.weights.discard(self)

    def _may_fail(self, how: str) -> None:
        if self.world.happens(0.1):
            raise ModelLoadFailed(how)


async def request(world: World) -> None:
    """A client that asks for a model and may leave at any time."""
    asking = asyncio.create_task(_use(world))
    if world.happens(0.3):
        await world.pause(20)
        asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def _use(world: World) -> None:
    name = world.random.choice([None, *NAMES])
    may_load = world.happens(0.7)

    async def settings() -> LoadSettings:
        await world.pause()
        if world.happens(0.05):
            raise ModelLoadFailed("no settings")
        return load_settings()

    wanted = None if name is None else Wanted(FOLDER / name, settings if may_load else None)
    try:
        lease = await world.manager.acquire(wanted, keep_alive=world.random.choice([None, 0, -1]))
    except (ModelLoadFailed, ModelNotLoaded, RequestCancelled):
        return
    client = lease.client
    world.holders[client] += 1
    try:
        if may_load and name is not None:
            assert client.name == name, "not what was asked for"
        assert client.state != "closed" or client in world.cut_off, "a model that was gone already"
        await world.pause(10)
    finally:
        world.holders[client] -= 1
        lease.release()
        lease.release()


async def change(world: World) -> None:
    """An administrator."""
    name = world.random.choice(NAMES)
    what = world.random.choice(["load", "load", "skip", "unload", "unload any", "crash", "keep"])
    if what == "keep":
        world.manager.keep(FOLDER / name, 0)
        return
    if what == "crash":
        for resident in world.manager._residents.values():
            if resident.directory.name == name and resident.client.state == "ready":
                resident.client.state = "failed"
                world.weights.discard(resident.client)
        return
    forces = what != "load"
    world.forced += forces
    try:
        if what.startswith("unload"):
            await world.manager.unload(FOLDER / name if what == "unload" else None)
        else:
            settings = load_settings(max_seq_len=world.random.choice([256, 512]))
            async for _ in world.manager.load(FOLDER / name, settings, skip_queue=forces):
                if world.happens(0.2):
                    break
    except (ModelLoadFailed, ModelNotFound, ModelNotLoaded, RequestCancelled):
        pass
    finally:
        world.forced -= forces


async def end(world: World) -> None:
    """The server's, in the middle of it all."""
    world.forced += 1
    if world.happens(0.5):
        await world.manager.stop_loading()
        await world.pause(20)
    await world.manager.close(force=world.happens(0.5))


async def play(world: World) -> None:
    async def actor() -> None:
        for _ in range(12):
            await world.pause(10)
            await (request(world) if world.happens(0.85) else change(world))

    actors = [asyncio.create_task(actor()) for _ in range(6)]
    ends_at = world.random.randint(1, 300) if world.happens(0.3) else STEPS
    for step in range(STEPS):
        if all(each.done() for each in actors):
            break
        if step == ends_at:
            actors.append(asyncio.create_task(end(world)))
        await asyncio.sleep(0)
        world.check()
    assert all(each.done() for each in actors), "somebody waits for ever"
    for each in actors:
        each.result()
    manager = world.manager
    assert all(resident.requests == 0 for resident in manager._residents.values()), "a lease that nobody holds"
    while manager._tasks:
        await asyncio.sleep(0)
    assert manager._waiters == []
    if not manager._closed:
        assert manager._clients == {resident.client for resident in manager._residents.values()}
    await manager.close()
    assert (manager.loaded, world.weights) == (0, set())


def run(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.setattr("backends.manager.EngineClient", ShakyClient)
    for seed in seeds:
        try:
            ShakyClient.world = World(seed)

            async def start() -> None:
                await play(ShakyClient.world)

            asyncio.run(start())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_no_order_of_events_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, range(30))


@pytest.mark.slow
def test_no_order_of_many_events_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, range(1000, 1400))
