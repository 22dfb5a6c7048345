"""The server under everything at once: mixed clients, kills of its engine, loads, bursts.

    python -m tests.soak [--minutes 20] [--seed N] [--report FILE]

Runs the real server with tiny models, checks every answer, and writes a report. The exit status is 1 when something
happened that must not: a wrong or broken answer, an error without a reason, a request that hangs, a /health other than
200, memory or descriptors that grow, a traceback in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import httpx

from tests import models
from tests.serving import ServerProcess, served
from tests.soak import chaos
from tests.soak.chaos import Administrator
from tests.soak.clients import Client
from tests.soak.processes import Processes, sample
from tests.soak.questions import RightAnswers, learn, questions
from tests.soak.record import Record
from tests.soak.report import judge, report

KEYS: Final = ("soak-key-a", "soak-key-b", "soak-key-c")
MODELS: Final = ("tiny-hybrid", "tiny-llama")
CLIENTS: Final = 6
IDLE_SECONDS: Final = 60
# uvicorn shuts down in order, and then passes the signal on.
ENDED_BY_SIGNAL: Final = (0, -signal.SIGTERM)
OPTIONS: Final = {
    "sysmem-kv-cache": 64,
    "sysmem-recurrent-cache": 64,
    "max-queue": 24,
    "max-queue-per-key": 12,
    "queue-timeout": 120,
    "stream-timeout": 60,
    "engine-timeout": 120,
    "sse-ping-interval": 1,
}


@dataclass(frozen=True)
class Schedule:
    """
    Attributes:
        seconds: that clients work.
        kill_every: seconds between kills of an engine process.
        load_every: seconds between what an administrator does.
        burst_every: seconds between bursts of requests.
    """

    seed: int
    seconds: float
    kill_every: float
    load_every: float
    burst_every: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--report", type=Path, help="file to write the report to as well")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--load-every", type=float, default=75.0, metavar="SECONDS")
    parser.add_argument("--burst-every", type=float, default=45.0, metavar="SECONDS")
    parser.add_argument(
        "--models", type=Path, help="folder with tiny-llama and tiny-hybrid, where they are made already"
    )
    given = parser.parse_args(argv)
    schedule = Schedule(given.seed, given.minutes * 60, given.kill_every, given.load_every, given.burst_every)
    # Before torch is imported: an engine with more threads than cores left spends its time waiting for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        text, passed = soak(Path(folder), given.models, schedule)
    print(text)
    if given.report is not None:
        given.report.write_text(f"seed {given.seed}\n{text}", encoding="utf-8")
    return 0 if passed else 1


def soak(folder: Path, model_dir: Path | None, schedule: Schedule) -> tuple[str, bool]:
    """Returns the report, and whether nothing happened that must not."""
    model_dir = model_dir or make_models(folder / "models")
    options = {**OPTIONS, "disk-cache-dir": folder / "cache"}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with served(folder, *arguments, model=model_dir / MODELS[0]) as server:
        keys = "\n".join(f"  - {key}" for key in KEYS)
        (folder / "api_tokens.yml").write_text(f"api_key:\n{keys}\nadmin_key: {server.admin_key}\n", encoding="utf-8")
        record, processes = Record(), Processes(server.process.pid)
        files = asyncio.run(run(server, schedule, record, processes))
    if server.process.returncode not in ENDED_BY_SIGNAL:
        record.violation(f"the server ends with status {server.process.returncode}")
    if left := [pid for pid in processes.of_engines if Path(f"/proc/{pid}").exists()]:
        record.violation(f"engine processes are left: {left}")
    for text in tracebacks(server.log):
        record.violation(f"in the log: {text}")
    judge(record, processes, *files)
    return report(record, processes, *files, server.log), not record.violations


def make_models(folder: Path) -> Path:
    models.make_hybrid(folder / MODELS[0])
    models.make_llama(folder / MODELS[1])
    return folder


async def run(server: ServerProcess, schedule: Schedule, record: Record, processes: Processes) -> tuple[int, int]:
    """Returns the server's open descriptors before and after."""
    async with connected(server, server.admin_key) as admin, connected(server, KEYS[-1]) as http:
        await until_keys_are_known(admin, http)
        right = await learn_all(admin)
    before = await open_files(server)
    record.started = processes.started = time.monotonic()
    random = Random(schedule.seed)
    pool = list(questions())
    clients = [
        Client(server.base_url, KEYS[number % len(KEYS)], right, record, Random(random.random()), pool)
        for number in range(CLIENTS)
    ]
    async with connected(server, server.admin_key) as admin:
        administrator = Administrator(admin, MODELS, record, Random(random.random()))
        end = time.monotonic() + schedule.seconds

        def over() -> bool:
            return time.monotonic() >= end

        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.work(over))
            tasks.create_task(chaos.watch_health(admin, record, over))
            tasks.create_task(chaos.take_samples(processes, over))
            tasks.create_task(
                chaos.kill_engines(admin, processes, record, Random(random.random()), schedule.kill_every, over)
            )
            tasks.create_task(administrator.work(schedule.load_every, over))
            tasks.create_task(
                chaos.burst_now_and_then(clients, record, Random(random.random()), schedule.burst_every, over)
            )
        for client in clients:
            await client.close()
        await until_idle(admin, record)
    return before, await open_files(server)


def connected(server: ServerProcess, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=300)


async def until_keys_are_known(admin: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    """The file with the keys has changed; the server looks at it every few seconds."""
    while not (await admin.get("/v1/auth/permission")).is_success or not (await client.get("/v1/models")).is_success:
        await asyncio.sleep(0.2)


async def learn_all(admin: httpx.AsyncClient) -> dict[str, RightAnswers]:
    """The right answers of each model; the first one is loaded in the end."""
    right = {}
    for name in reversed(MODELS):
        (await admin.post("/v1/model/load", json={"model_name": name, **chaos.LOAD_FIELDS})).raise_for_status()
        right[name] = await learn(admin, admin)
    return right


async def until_idle(admin: httpx.AsyncClient, record: Record) -> None:
    """When all clients have gone, nothing runs or waits any more."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        response = await admin.get("/v1/cache", timeout=60)
        if response.status_code == 200:
            state = response.json()
            if state["active_requests"] == state["queued_requests"] == 0:
                return
        await asyncio.sleep(0.5)
    record.violation(f"the engine is not idle after the last client: {response.text[:300]}")


async def open_files(server: ServerProcess) -> int:
    """Once the connections of clients that have gone are closed."""
    await asyncio.sleep(3)
    server.wait_until("/health")
    await asyncio.sleep(1)
    taken = sample(server.process.pid, 0)
    return taken.files if taken is not None else 0


def tracebacks(log: Sequence[str]) -> list[str]:
    """Each with the line before it and those after it."""
    return [
        " | ".join(log[max(0, number - 1) : number + 40])[:3000]
        for number, line in enumerate(log)
        if line.startswith("Traceback (most recent call last)")
    ]


if __name__ == "__main__":
    sys.exit(main())
