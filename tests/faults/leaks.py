"""What a process holds, counted before and after a fault."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from tests.endpoints.running import RunningServer

DESCRIPTORS = "/proc/self/fd"
# Threads that are started when there is work for them, and stay, or stay for a while: of asyncio.to_thread(), of AnyIO,
# and the server's own.
POOLS = ("asyncio_", "AnyIO worker thread", "constraints_", "prompts", "resolver")


class Held(NamedTuple):
    """By the process of the tests, and so by a server that runs in it."""

    tasks: int  # of the loop that asks
    threads: int
    descriptors: int  # 0 where the system does not tell, as for children
    children: int  # those too that have ended and that nobody has asked for their exit code


async def held() -> Held:
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(POOLS)]
    return Held(len(asyncio.all_tasks()), len(threads), open_descriptors(), len(children("self")))


def held_by(server: RunningServer) -> Held:
    """By a running server, apart from the connections that clients in this process keep open."""

    async def count() -> Held:
        everything = await held()
        connections = len(server.connections)
        return everything._replace(descriptors=everything.descriptors - 2 * connections)

    return server.call(count())


def held_at_rest_by(server: RunningServer) -> Held:
    """The same, once nothing of it changes any more, such as a connection that one end has closed."""
    now, before = held_by(server), None
    while now != before:
        time.sleep(0.1)
        now, before = held_by(server), now
    return now


def open_descriptors() -> int:
    """0 where the system does not tell."""
    gc.collect()  # what is closed when it is collected
    return len(os.listdir(DESCRIPTORS)) if os.path.isdir(DESCRIPTORS) else 0


def children(process: int | str) -> list[int]:
    """Processes that a process has started; none where the system does not tell."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for found in lists for child in found.read_text(encoding="ascii").split()]


@asynccontextmanager
async def nothing_left_behind() -> AsyncIterator[None]:
    """As much is held after the block as before; what is ending may take its time."""
    before = await held()
    yield
    while await held() != before:
        await asyncio.sleep(0.02)
