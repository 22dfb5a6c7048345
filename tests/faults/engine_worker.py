"""The real engine's worker process, with faults that a test arms while it runs.

    python -m tests.faults.engine_worker FOLDER

A file in FOLDER with the name of a fault arms it. What happens once removes the file; the rest lasts while it is there.
"""

from __future__ import annotations

import errno
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backends import worker
from backends.exllamav3.engine import Generator, Model

# What happens: to a prompt that is processed, to all jobs that decode, to a model that is loaded.
PREFILL_OUT_OF_MEMORY = "prefill-out-of-memory"
PREFILL_HANGS = "prefill-hangs"
PREFILL_IS_SLOW = "prefill-is-slow"
DECODE_OUT_OF_MEMORY = "decode-out-of-memory"
DECODE_HANGS = "decode-hangs"
DECODE_IS_SLOW = "decode-is-slow"
START_OUT_OF_MEMORY = "start-out-of-memory"
LOAD_OUT_OF_MEMORY = "load-out-of-memory"
DISK_FULL = "disk-full"
CLOCK_JUMPS = "clock-jumps"

FOREVER = 3600.0
HOUR = 3600.0
STEP_SECONDS = 0.05


class Faults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_armed(self, fault: str) -> bool:
        return (self._folder / fault).exists()

    def happens(self, fault: str) -> bool:
        armed = self.is_armed(fault)
        (self._folder / fault).unlink(missing_ok=True)
        return armed

    def install(self) -> None:
        before(Model, "prefill", self._prefill)
        before(Model, "forward", self._forward)
        before(Model, "load_gen", self._load)
        before(Generator, "enqueue", self._start)
        time.time = jumping_clock((self._folder / CLOCK_JUMPS).exists)

    def _prefill(self) -> None:
        if self.happens(PREFILL_OUT_OF_MEMORY):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")
        if self.happens(PREFILL_HANGS):
            time.sleep(FOREVER)
        if self.is_armed(PREFILL_IS_SLOW):
            time.sleep(STEP_SECONDS)

    def _forward(self) -> None:
        if self.happens(DECODE_OUT_OF_MEMORY):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nSee documentation.")
        if self.happens(DECODE_HANGS):
            time.sleep(FOREVER)
        if self.is_armed(DECODE_IS_SLOW):
            time.sleep(STEP_SECONDS)

    def _load(self) -> None:
        if self.happens(LOAD_OUT_OF_MEMORY):
            raise RuntimeError("Insufficient VRAM in split for model and cache")

    def _start(self) -> None:
        if self.happens(START_OUT_OF_MEMORY):
            raise MemoryError

    def full_disk(self, *arguments: object) -> None:
        if self.is_armed(DISK_FULL):
            raise OSError(errno.ENOSPC, "No space left on device")


def jumping_clock(jumps: Callable[[], bool]) -> Callable[[], float]:
    """A wall clock that goes back, and forth, by an hour at each look at it, while `jumps`."""
    wall_clock, offsets = time.time, itertools.cycle((-HOUR, HOUR))
    return lambda: wall_clock() + (next(offsets) if jumps() else 0.0)


def before(owner: Any, name: str, do: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        do()
        return method(*arguments, **options)

    setattr(owner, name, wrapped)


def main() -> None:
    faults = Faults(Path(sys.argv[1]))
    faults.install()
    from exllamav3.generator.disk_cache import DiskPageCache

    for write in ("_do_write_page", "_do_write_state"):
        before(DiskPageCache, write, faults.full_disk)
    worker.run(worker.create_container)


if __name__ == "__main__":
    main()
