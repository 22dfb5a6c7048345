"""Fair turns: who has many jobs in the queue of the engine does not keep those of others waiting.

The engine starts its jobs in the order of a list. Each job gets a turn when it is queued, and the list is kept in the
order of the turns: start-time fair queueing (Goyal, Vin and Cheng 1996) with jobs of equal length. In each round every
owner that waits has one job, and the owners keep their places from round to round. So between two jobs of an owner that
has another one waiting, no other owner has more than one. One with a single job in the queue, or a single owner, is
served as without turns.
"""

from __future__ import annotations

import itertools
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar


class Turn(NamedTuple):
    """Turns compare as their jobs start."""

    round: int
    place: int  # of the owner, the same in all rounds while it waits


class Waiting(Protocol):
    """A job of the queue.

    Attributes:
        owner: whose it is; see `GenerationRequest.owner`.
        turn: set when it is queued. A job that is queued again, for a further segment of its answer, keeps it.
    """

    owner: str
    turn: Turn


W = TypeVar("W", bound=Waiting)

_in_turn = attrgetter("turn")


class Turns:
    """The order of one queue, the engine's list of pending jobs.

    Call `queued()`, `started()` and `withdrawn()` for what happens to a job, in the order in which it happens.
    """

    def __init__(self) -> None:
        self._round = 0  # of the jobs that start now
        self._last: dict[str, Turn] = {}  # of each owner that has a job in the queue, or had one start in this round
        self._places = itertools.count()

    def queued(self, job: W, queue: list[W]) -> None:
        """A job has been added to the queue: give it its turn, and put it where that belongs."""
        last = self._last.get(job.owner)
        if last is None:
            job.turn = Turn(self._round, next(self._places))
        else:
            job.turn = Turn(max(self._round, last.round + 1), last.place)
        self._last[job.owner] = job.turn
        queue.sort(key=_in_turn)

    def started(self, job: Waiting) -> None:
        """A job has left the queue, and works."""
        if job.turn.round > self._round:  # else one that did not fit before has been overtaken
            self._round = job.turn.round
            self._last = {owner: last for owner, last in self._last.items() if last.round >= self._round}

    def withdrawn(self, job: W, queue: list[W]) -> None:
        """A job that never started has left the queue: those of its owner behind it move up."""
        free = job.turn
        for other in queue:
            if other.owner == job.owner and other.turn > free:
                other.turn, free = free, other.turn
        self._last[job.owner] = Turn(free.round - 1, free.place)
        queue.sort(key=_in_turn)
