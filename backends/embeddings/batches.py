"""Whose texts are computed next: jobs take turns, so that a large one does not hold up small ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


class Piece(NamedTuple, Generic[Value]):
    """One of the values of a job."""

    place: int  # in the job
    tokens: int  # that it takes
    value: Value


class Job(Generic[Value, Result]):
    """Values that are computed for the same request, in as many steps as it takes.

    Attributes:
        request_id: of the request.
        key: what can be computed together has the same.
        done: the results, in the order of the values; fails with what a step of it has failed with.
    """

    def __init__(self, request_id: str, key: Hashable, values: Sequence[Value], tokens: Sequence[int]) -> None:
        """
        Args:
            request_id, key: see above.
            values: at least one.
            tokens: that each of them takes.
        """
        self.request_id = request_id
        self.key = key
        self.done: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        # The longest first: steps of values of one length are padded least, and memory runs out at once or never.
        pieces = sorted(map(Piece, range(len(values)), tokens, values), key=lambda piece: -piece.tokens)
        self._pending = deque(pieces)
        self._count = len(pieces)
        self._finished: dict[int, Result] = {}

    @property
    def next(self) -> Piece[Value] | None:
        """What it gives to the next step, if anything."""
        return self._pending[0] if self._pending else None

    def take(self) -> Piece[Value]:
        return self._pending.popleft()

    def finish(self, pieces: Sequence[Piece[Value]], results: Sequence[Result]) -> None:
        self._finished.update((piece.place, result) for piece, result in zip(pieces, results, strict=True))
        if len(self._finished) == self._count and not self.done.done():
            self.done.set_result([self._finished[place] for place in range(self._count)])

    def fail(self, error: Exception) -> None:
        self._pending.clear()
        if not self.done.done():
            self.done.set_exception(error)


class Batches(Generic[Value, Result]):
    """The jobs that are not done.

    A step is led by the job whose turn it is; others with its key fill it up, one value each in turn. A lone job so
    gets all of each step, and a new one has its first value in the step that comes next or as soon as its turn comes.

    Args:
        tokens: of a step, padding included. A value that alone takes more has a step for itself.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._jobs: deque[Job[Value, Result]] = deque()  # in the order of their turns

    def add(self, job: Job[Value, Result]) -> None:
        self._jobs.append(job)

    def remove(self, job: Job[Value, Result]) -> None:
        """Compute no more of a job, done or not."""
        if job in self._jobs:
            self._jobs.remove(job)

    def next(self) -> dict[Job[Value, Result], list[Piece[Value]]]:
        """What to compute in the next step, by job; nothing where there is none."""
        if not self._jobs:
            return {}
        lead = self._jobs[0]
        step: dict[Job[Value, Result], list[Piece[Value]]] = {}
        taking = deque(job for job in self._jobs if job.key == lead.key)
        width = count = 0
        while taking:
            job = taking.popleft()
            piece = job.next
            if piece is None:
                continue
            wider = max(width, piece.tokens)
            if count and wider * (count + 1) > self._tokens:
                continue  # no more of this job; what another has may be shorter
            step.setdefault(job, []).append(job.take())
            width, count = wider, count + 1
            taking.append(job)
        self._jobs.rotate(-1)
        self._jobs = deque(job for job in self._jobs if job.next is not None)
        return step
