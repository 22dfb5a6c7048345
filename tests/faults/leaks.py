"""What a process holds, counted before and after a fault."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

DESCRIPTORS = "/proc/self/fd"


def open_descriptors() -> int:
    """0 where the system does not tell."""
    gc.collect()  # what is closed when it is collected
    return len(os.listdir(DESCRIPTORS)) if os.path.isdir(DESCRIPTORS) else 0


@asynccontextmanager
async def nothing_left_behind() -> AsyncIterator[None]:
    """As many tasks and open files after the block as before; what is ending may take its time."""
    tasks, descriptors = len(asyncio.all_tasks()), open_descriptors()
    yield
    while (left := (len(asyncio.all_tasks()), open_descriptors())) > (tasks, descriptors) or left[1] > descriptors:
        await asyncio.sleep(0.02)
