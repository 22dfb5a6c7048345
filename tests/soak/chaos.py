"""What goes wrong during a soak, and who watches it: kills, loads, bursts, health checks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import httpx

from tests.soak.clients import Broken, Client, Failed, check_events, check_status
from tests.soak.processes import Processes
from tests.soak.record import Record, Window

HEALTH_SECONDS: Final = 1.0
SAMPLE_SECONDS: Final = 10.0
# What every model is loaded with. A small cache, so that pages are evicted.
LOAD_FIELDS: Final = {"max_seq_len": 4096, "cache_size": 8192, "chunk_size": 512}
# An engine starts in some seconds; here it may share two cores with everything else.
RECOVERY_SECONDS: Final = 120.0
BURST_SIZE: Final = 60

Until = Callable[[], bool]


async def pause(seconds: float, until: Until) -> None:
    """Wait, but not past the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        await asyncio.sleep(0.2)


async def watch_health(http: httpx.AsyncClient, record: Record, until: Until) -> None:
    """/health says 200 at any time."""
    while not until():
        started = time.monotonic()
        try:
            status = (await http.get("/health", timeout=30)).status_code
            if status != 200:
                record.violation(f"/health says {status}")
        except httpx.HTTPError as error:
            record.violation(f"/health does not answer: {error!r}")
        record.health.append(time.monotonic() - started)
        await pause(HEALTH_SECONDS, until)


async def take_samples(processes: Processes, until: Until) -> None:
    while not until():
        processes.take()
        await pause(SAMPLE_SECONDS, until)


async def kill_engines(
    http: httpx.AsyncClient, processes: Processes, record: Record, random: Random, every: float, until: Until
) -> None:
    """Kill an engine process now and then; a model answers again soon."""
    await pause(every / 2, until)
    while not until():
        if engines := processes.engines():
            with record.window("kill"):
                killed = time.monotonic()
                os.kill(random.choice(engines), signal.SIGKILL)
                await asyncio.sleep(0.5)  # until it is noticed
                await until_ready(http, record)
                record.recoveries.append(time.monotonic() - killed)
        await pause(every * random.uniform(0.9, 1.1), until)


async def until_ready(http: httpx.AsyncClient, record: Record) -> None:
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (response := await http.get("/ready", timeout=30)).status_code != 200:
        if time.monotonic() > deadline:
            record.violation(f"/ready does not recover: {response.text}")
            return
        await asyncio.sleep(0.1)


class Administrator:
    """Loads, swaps and unloads models.

    Args:
        http: a client with the admin key.
        models: names; the first is loaded.
    """

    def __init__(self, http: httpx.AsyncClient, models: Sequence[str], record: Record, random: Random) -> None:
        self._http = http
        self._models = models
        self._record = record
        self._random = random
        self._loaded = models[0]

    async def work(self, every: float, until: Until) -> None:
        actions = [self._swap, self._swap, self._swap_at_once, self._same_again, self._unload, self._load_nothing]
        turn = 0
        await pause(every, until)
        while not until():
            await actions[turn % len(actions)]()
            turn += 1
            await pause(every * self._random.uniform(0.8, 1.2), until)

    async def load(self, name: str, **fields: object) -> str:
        """Returns "finished" or the code of the error."""
        try:
            response = await self._http.post(
                "/v1/model/load", json={"model_name": name, **LOAD_FIELDS, **fields}, timeout=300
            )
            await check_status(response)
            events: list[dict[str, Any]] = check_events(response.text.splitlines())
        except Failed as failure:
            return failure.code
        except (Broken, httpx.HTTPError, ValueError, LookupError) as error:
            self._record.violation(f"a load of {name} is not answered as it should be: {error!r}")
            return "broken"
        return "finished" if events and events[-1].get("status") == "finished" else f"ends with {events[-1:]}"

    async def _swap(self, **fields: object) -> None:
        other = next(name for name in self._models if name != self._loaded)
        with self._record.window("load") as window:
            outcome = await self.load(other, **fields)
            self._record.loads.append((f"swap {fields or ''}".strip(), outcome))
            if outcome == "finished":
                self._loaded = other
            else:
                await self._make_ready(outcome, window)

    async def _swap_at_once(self) -> None:
        await self._swap(skip_queue=True)

    async def _same_again(self) -> None:
        """What is loaded already is answered at once, and nothing happens to requests."""
        outcome = await self.load(self._loaded)
        self._record.loads.append(("the same again", outcome))

    async def _unload(self) -> None:
        with self._record.window("unload") as window:
            response = await self._http.post("/v1/model/unload", timeout=120)
            if response.status_code != 200:
                self._record.violation(f"an unload is answered with {response.text}")
            await asyncio.sleep(1)
            outcome = await self.load(self._loaded)
            self._record.loads.append(("load after an unload", outcome))
            if outcome != "finished":
                await self._make_ready(outcome, window)

    async def _load_nothing(self) -> None:
        """A model that is not there; the loaded one goes on."""
        outcome = await self.load("no-such-model")
        self._record.loads.append(("of no model", outcome))
        if outcome != "model_not_found":
            self._record.violation(f"a load of a model that is not there ends with {outcome}")

    async def _make_ready(self, outcome: str, window: Window) -> None:
        """A load that a kill has spoilt leaves the earlier model, or none."""
        killed = any(other.kind == "kill" and other.ended >= window.started for other in self._record.windows)
        if outcome != "model_load_failed" or not killed:
            self._record.violation(f"a load ends with {outcome}")
        for _ in range(5):
            if (await self._http.get("/ready")).status_code == 200:
                break
            await self.load(self._loaded)
        card = (await self._http.get("/v1/model")).json()
        self._loaded = card.get("id", self._loaded)


async def burst_now_and_then(
    clients: Sequence[Client], record: Record, random: Random, every: float, until: Until
) -> None:
    """More requests at once than may wait: from one key, or from all."""
    await pause(every, until)
    while not until():
        with record.window("burst"):
            chosen = random.choice([[random.choice(clients)], list(clients)])
            await asyncio.gather(*(random.choice(chosen).burst() for _ in range(BURST_SIZE)))
        await pause(every * random.uniform(0.8, 1.2), until)
