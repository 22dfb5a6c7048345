"""Processes of the server as Linux shows them in /proc: its engines, memory, and open files."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import NamedTuple

_PROC = Path("/proc")


class Sample(NamedTuple):
    """Of one process.

    Attributes:
        at: seconds since the beginning.
        memory: MB that are resident.
        files: open descriptors.
    """

    at: float
    memory: float
    files: int


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    found: set[int] = set()
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(child) for child in task.read_text().split()}
    return sorted(found)


def sample(pid: int, at: float) -> Sample | None:
    """None: it has ended."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
        files = len(list((_PROC / str(pid) / "fd").iterdir()))
    except OSError:
        return None
    memory = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return Sample(at, int(memory[0]) / 1024, files) if memory else None


@dataclass
class Curve:
    """Samples of one process over its life."""

    samples: list[Sample] = field(default_factory=list)

    def quarters(self, what: str) -> tuple[float, float]:
        """Medians of the first and the last quarter."""
        values = [getattr(sample, what) for sample in self.samples]
        size = max(1, len(values) // 4)
        return median(values[:size]), median(values[-size:])

    def slope(self, what: str) -> float:
        """Per hour, by least squares; 0 for fewer than two samples."""
        if len(self.samples) < 2:
            return 0.0
        slope, _ = linear_regression([sample.at for sample in self.samples], [getattr(s, what) for s in self.samples])
        return slope * 3600


@dataclass
class Processes:
    """The server and each engine that it has had.

    Args:
        server: its process id.
    """

    server: int
    started: float = field(default_factory=time.monotonic)
    of_server: Curve = field(default_factory=Curve)
    of_engines: dict[int, Curve] = field(default_factory=dict)

    def engines(self) -> list[int]:
        return children(self.server)

    def take(self) -> None:
        at = time.monotonic() - self.started
        if (taken := sample(self.server, at)) is not None:
            self.of_server.samples.append(taken)
        for pid in self.engines():
            if (taken := sample(pid, at)) is not None:
                self.of_engines.setdefault(pid, Curve()).samples.append(taken)
