"""The generations of Kobold's clients, which they can ask about and end by a key of their choice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

from starlette.requests import Request

from common.caching import EVERYBODY
from common.errors import RequestCancelled
from common.generation import Usage
from endpoints.admission import Place

# How long, and how many of all clients, an answer can still be asked for after its end.
KEPT_SECONDS: Final = 60.0
MAX_KEPT: Final = 64


class Owner(NamedTuple):
    """Whose a generation is: front ends choose short keys, which anybody could guess.

    Attributes:
        key: stands for the API key.
        host: of the client, where the key does not tell clients apart.
    """

    key: str
    host: str

    @classmethod
    def of(cls, request: Request) -> Owner:
        key: str = request.state.owner
        host = request.client.host if key == EVERYBODY and request.client is not None else ""
        return cls(key, host)


_Key: TypeAlias = tuple[Owner, str]


class Generation:
    """
    Attributes:
        aborted: its client has ended it.
        usage: of its first answer, once that has finished.
    """

    def __init__(self, key: _Key, place: Place) -> None:
        self.key = key
        self.aborted = False
        self.usage: Usage | None = None
        self.ended_at: float | None = None
        self._place = place
        self._texts: dict[int, list[str]] = {}

    def add(self, index: int, text: str) -> None:
        """Text of an answer has come."""
        self._texts.setdefault(index, []).append(text)

    def text(self, index: int) -> str:
        return "".join(self._texts.get(index, ()))

    def texts(self) -> list[str]:
        """Those of all answers so far; at least one."""
        return [self.text(index) for index in range(max(self._texts, default=0) + 1)]

    def abort(self) -> None:
        self.aborted = True
        self._place.fail(RequestCancelled("The generation was aborted by its client."))


class Generations:
    """Those that run, and for a short time those that have ended."""

    def __init__(self) -> None:
        self._generations: list[Generation] = []  # as they began

    def begin(self, owner: Owner, genkey: str, place: Place) -> Generation:
        """A generation, which ends with its request. What has ended under the same key is forgotten.

        Args:
            genkey: that the client has given it; empty for none.
            place: of its request.
        """
        generation = Generation((owner, genkey), place)
        self._generations = [other for other in self._remembered() if other.key != generation.key or _runs(other)]
        self._generations.append(generation)
        place.on_leave = partial(self._end, generation)
        return generation

    def last(self, owner: Owner, genkey: str) -> Generation | None:
        """The one of that key that began last."""
        self._generations = list(self._remembered())
        return next((one for one in reversed(self._generations) if one.key == (owner, genkey)), None)

    def last_of(self, owner: Owner) -> Generation | None:
        """The one of any key that began last."""
        self._generations = list(self._remembered())
        return next((one for one in reversed(self._generations) if one.key[0] == owner), None)

    def abort(self, owner: Owner, genkey: str) -> None:
        """End all of that key."""
        for generation in self._generations:
            if generation.key == (owner, genkey) and _runs(generation):
                generation.abort()

    def _end(self, generation: Generation) -> None:
        generation.ended_at = monotonic()
        self._generations = list(self._remembered())

    def _remembered(self) -> Iterator[Generation]:
        oldest = monotonic() - KEPT_SECONDS
        ended = sum(not _runs(generation) for generation in self._generations)
        for generation in self._generations:
            if _runs(generation):
                yield generation
                continue
            if ended <= MAX_KEPT and (generation.ended_at or 0.0) >= oldest:
                yield generation
            else:
                ended -= 1


def _runs(generation: Generation) -> bool:
    return generation.ended_at is None
