"""Programs that a benchmark starts as processes of their own and talks with in lines of JSON, one answer a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

ROOT = Path(__file__).resolve().parents[1]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have prompts answered side by side, greedily, each with exactly so many tokens."""

    prompts: list[str]  # of the user
    max_tokens: list[int]
    starts: list[float]  # seconds after which each is sent


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a path again and again, on one connection."""

    path: str
    seconds: float
    pause: float  # seconds between two


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a prompt, in seconds since the `Ask`."""

    sent: float
    begun: float  # of a stream: when its headers came
    texts: list[float]  # when each piece of text came
    pings: list[float]
    ended: float
    tokens: int


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    answers: list[Answer]
    cpu: float  # seconds of this process
    latencies: list[float] = []  # of a `Probe`

    @property
    def seconds(self) -> float:
        return max(answer.ended for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


Job: TypeAlias = Ask | Probe

_encoder = msgspec.json.Encoder()
_read_job = msgspec.json.Decoder(Job).decode
_read_answers = msgspec.json.Decoder(Answers).decode


class Driver:
    """The parent's side."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def start(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(_encoder.encode(job) + b"\n")
        self.process.stdin.flush()

    def result(self) -> Answers:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} has ended")
        return _read_answers(line)

    def run(self, job: Job) -> Answers:
        self.start(job)
        return self.result()


@contextmanager
def driver(module: str, *arguments: str) -> Iterator[Driver]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Driver(process)
    finally:
        process.communicate(timeout=60)  # the end of its stdin is the end of its work


async def serve_jobs(work: Callable[[Job], Awaitable[Answers]]) -> None:
    """The child's side. Nothing else may run while it waits for the next job."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_encoder.encode(await work(_read_job(line))) + b"\n")
        sys.stdout.buffer.flush()
