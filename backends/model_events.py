"""What happens to models, for those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, NamedTuple, TypeAlias

from backends.messages import LoadProgress

# "sleeping": unloaded after model.idle_timeout; the next request for it loads it again.
ModelState: TypeAlias = Literal["loaded", "loading", "sleeping", "failed", "unloaded"]


class ModelEvent(NamedTuple):
    """A model has got into a state, or on in it.

    Attributes:
        name: of its folder.
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
        for follower in self._followers:
            follower._events.put_nowait(event)

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
    """Iterate for the events. It has to be closed in the end."""

    def __init__(self, source: ModelEvents) -> None:
        """For `ModelEvents.follow()`."""
        self._source = source
        self._events: asyncio.Queue[ModelEvent | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[ModelEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    def close(self) -> None:
        self._source._followers.discard(self)
