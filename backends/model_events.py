"""What happens to models, for those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Literal, NamedTuple, TypeAlias

from backends.messages import LoadProgress
from common.errors import ServerBusy

# How far behind what happens a follower may be: some dozen loads. One that does not read costs no more memory.
MOST_EVENTS: Final = 10_000

# "sleeping": unloaded after model.idle_timeout; the next request for it loads it again.
ModelState: TypeAlias = Literal["loaded", "loading", "sleeping", "failed", "unloaded"]


class ModelEvent(NamedTuple):
    """A model has got into a state, or on in it.

    Attributes:
        name: see `ModelManager.name_of()`.
        progress: while it loads.
        reason: why it has failed or is unloaded.
    """

    name: str
    state: ModelState
    progress: LoadProgress | None = None
    reason: str | None = None


class ModelEvents:
    """Hands events on to whoever follows them at the time."""

    def __init__(self) -> None:
        self._followers: set[Follower] = set()
        self._closed = False

    def tell(self, event: ModelEvent) -> None:
        for follower in list(self._followers):
            follower._receive(event)

    def close(self) -> None:
        """Nothing happens any more: who follows comes to the end."""
        self._closed = True
        for follower in self._followers:
            follower._events.put_nowait(None)

    def follow(self) -> Follower:
        """What happens from this call on."""
        follower = Follower(self)
        self._followers.add(follower)
        if self._closed:
            follower._events.put_nowait(None)
        return follower


class Follower:
    """Iterate for the events. It has to be closed in the end.

    Who is `MOST_EVENTS` behind misses the next ones: the iteration then raises `ServerBusy` after those that there are.
    """

    def __init__(self, source: ModelEvents) -> None:
        """For `ModelEvents.follow()`."""
        self._source = source
        self._events: asyncio.Queue[ModelEvent | None] = asyncio.Queue()
        self._missed = False

    async def __aiter__(self) -> AsyncIterator[ModelEvent]:
        while (event := await self._events.get()) is not None:
            yield event
        if self._missed:
            raise ServerBusy("What happens to models was not read in time, and goes on untold. Ask for it again.")

    def close(self) -> None:
        self._source._followers.discard(self)

    def _receive(self, event: ModelEvent) -> None:
        if self._events.qsize() < MOST_EVENTS:
            self._events.put_nowait(event)
        else:
            self._missed = True
            self._events.put_nowait(None)
            self.close()
