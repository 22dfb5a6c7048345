"""The models that are up: who uses them, when they are put to sleep, and which of them make room for another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.client import EngineClient
from common.errors import InvalidRequest

MB: Final = 1 << 20
FOREVER: Final = math.inf


class Lease:
    """The right to use a model. Until `release()` the model makes no room for others and does not go to sleep."""

    def __init__(self, resident: Resident) -> None:
        """For `Resident.lease()`."""
        self._resident = resident
        self._held = True

    @property
    def client(self) -> EngineClient:
        return self._resident.client

    def release(self) -> None:
        """The request has ended. Harmless after the first time."""
        if self._held:
            self._held = False
            self._resident._released()


class Resident:
    """A model that is up.

    Attributes:
        client: its process.
        closing: it takes no more requests, as another model is to have its room.
        keep_alive: seconds without use after which it counts as idle, or `FOREVER`.
        used_at: when it was last used, of the loop's clock.
    """

    def __init__(
        self,
        client: EngineClient,
        keep_alive: float,
        *,
        on_free: Callable[[], None],
        on_idle: Callable[[Resident], None],
    ) -> None:
        """
        Args:
            keep_alive: see above.
            on_free: called whenever the last of its requests has ended.
            on_idle: called when nobody has used it for so long.
        """
        self.client = client
        self.closing = False
        self.keep_alive = keep_alive
        self._on_free = on_free
        self._on_idle = on_idle
        self._leases = 0
        self._is_gone = False
        self._alarm: asyncio.TimerHandle | None = None
        self._touch()
        client.on_idle = self._used

    @property
    def directory(self) -> Path:
        return self.client.directory

    @property
    def failed(self) -> bool:
        """Its process is gone for good."""
        return self.client.state == "failed"

    @property
    def memory(self) -> int:
        """Bytes of device memory."""
        return 0 if self.failed else self.client.memory

    @property
    def requests(self) -> int:
        """That use it, whether its engine knows of them yet or not."""
        return max(self._leases, self.client.running)

    @property
    def busy(self) -> bool:
        return self.requests > 0

    @property
    def idle_in(self) -> float | None:
        """Seconds until it counts as idle if nobody uses it; None: it never does, or is in use."""
        if self.busy or self.keep_alive == FOREVER:
            return None
        return max(0.0, self.used_at + self.keep_alive - asyncio.get_running_loop().time())

    def lease(self, keep_alive: float | None = None) -> Lease:
        """
        Args:
            keep_alive: seconds to stay up after this and every later use, negative for ever; None: as before.
        """
        if keep_alive is not None:
            self.keep_alive = keep_alive if keep_alive >= 0 else FOREVER
        self._leases += 1
        self._touch()
        return Lease(self)

    def gone(self) -> None:
        """It is up no more."""
        self._is_gone = True
        self._stop_alarm()
        self.client.on_idle = lambda: None

    def _released(self) -> None:
        self._leases -= 1
        self._used()

    def _used(self) -> None:
        if self._is_gone:
            return
        self._touch()
        if not self.busy:
            self._on_free()

    def _touch(self) -> None:
        loop = asyncio.get_running_loop()
        self.used_at = loop.time()
        self._stop_alarm()
        if (seconds := self.idle_in) is not None:
            self._alarm = loop.call_later(seconds, self._on_idle, self)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


@dataclass(frozen=True)
class Room:
    """How many models may be up.

    Attributes:
        models: most at once.
        memory: bytes of device memory that they may take together; None: as much as there is.
    """

    models: int
    memory: int | None

    def check(self, name: str, memory: int) -> None:
        """Raise `InvalidRequest` for a model that does not fit though no other is up.

        Args:
            memory: bytes that it will take.
        """
        if self.memory is not None and memory > self.memory:
            raise InvalidRequest(
                f"{name} needs about {math.ceil(memory / MB)} MB, but model.memory_budget is {self.memory // MB}. "
                "Raise it, or load the model with a smaller cache_size, max_seq_len or cache_mode.",
                param="model_name",
            )

    def fits(self, residents: Iterable[Resident], memory: int) -> bool:
        """Whether a model has room beside others."""
        taken = [resident.memory for resident in residents]
        return len(taken) < self.models and (self.memory is None or sum(taken) + memory <= self.memory)

    def makers(self, residents: Iterable[Resident], memory: int) -> list[Resident]:
        """Those that make room for a model: the idle before the busy, the least recently used first.

        A busy one that has begun to make room goes on with it: were it spared as others come to be less recently used,
        and so on in turns, no room would ever be made.
        """
        staying = sorted(residents, key=_precedence)
        leaving: list[Resident] = []
        while staying and not self.fits(staying, memory):
            leaving.append(staying.pop(0))
        return leaving


def _precedence(resident: Resident) -> tuple[bool, bool, bool, float]:
    """In which order models make room."""
    return resident.busy, not resident.failed, not resident.closing, resident.used_at
