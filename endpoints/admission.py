"""The queue for the model, as far as the server keeps it: how many requests may wait in it, and for how long.

A request that generates gets a place when its key has been checked, before its body is read into anything. It waits
until the first of its answers begins, and has one place whatever number of answers it asks for. The engine decides who
is next (`backends.exllamav3.turns`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeAlias, TypeVar

from starlette.requests import Request

from common.caching import EVERYBODY
from common.config_models import NetworkConfig
from common.errors import QueueTimeout, ServerBusy, ServerError, TooManyRequests
from common.metrics import Metrics

T = TypeVar("T")

GiveUp: TypeAlias = Callable[[ServerError], None]

# The pace of the queue is that of so many requests that have begun last.
PACE_REQUESTS = 16
MOST_RETRY_SECONDS = 60


class RequestQueue:
    """The requests that generate, from their admission to their end.

    Args:
        network: `max_queue`, `max_queue_per_key` and `queue_timeout` count.
    """

    def __init__(self, network: NetworkConfig, metrics: Metrics) -> None:
        self._network = network
        self._metrics = metrics
        self._places: set[Place] = set()
        self._waiting: Counter[str] = Counter()  # by owner
        self._begun_at: deque[float] = deque(maxlen=PACE_REQUESTS)

    @property
    def waiting(self) -> int:
        """Requests that wait for the model."""
        return self._waiting.total()

    @property
    def in_flight(self) -> int:
        """Requests that wait, and those that have begun."""
        return len(self._places)

    def enter(self, owner: str) -> Place:
        """A place for a request, which must `leave()` it in the end.

        Args:
            owner: whose request it is; see `Caller.owner`. What belongs to everybody is not bounded by key.

        Raises:
            ServerBusy: too many wait.
            TooManyRequests: too many of this owner's wait.
        """
        try:
            self._check(owner)
        except ServerError as error:
            error.retry_after = self._seconds_until_next() or error.retry_after
            self._metrics.requests_refused.labels(error.code).inc()
            raise
        place = Place(self, owner, self._network.queue_timeout)
        self._places.add(place)
        self._waiting[owner] += 1
        self._metrics.requests_waiting.inc()
        return place

    def end_all(self, error: ServerError) -> None:
        """End all requests with an error, those that have begun too."""
        for place in list(self._places):
            place.fail(error)

    def _check(self, owner: str) -> None:
        most, most_of_key = self._network.max_queue, self._network.max_queue_per_key
        if most_of_key and owner != EVERYBODY and self._waiting[owner] >= most_of_key:
            raise TooManyRequests(
                f"{most_of_key} requests with this key wait for the model; network.max_queue_per_key allows no more. "
                "Send further ones when some of them have begun."
            )
        if most and self._waiting.total() >= most:
            raise ServerBusy(
                f"{most} requests wait for the model; network.max_queue allows no more. Try again in a moment."
            )

    def _seconds_until_next(self) -> int | None:
        """How long it will take until one of those that wait begins, by the pace so far; None before there is one."""
        if not self._begun_at:
            return None
        pace = (monotonic() - self._begun_at[0]) / len(self._begun_at)
        return min(math.ceil(pace), MOST_RETRY_SECONDS)

    def _stops_waiting(self, place: Place, *, begun: bool) -> None:
        self._waiting[place.owner] -= 1
        if not self._waiting[place.owner]:
            del self._waiting[place.owner]
        self._metrics.requests_waiting.dec()
        if begun:
            self._begun_at.append(monotonic())

    def _timed_out(self, place: Place) -> None:
        self._metrics.requests_refused.labels(QueueTimeout.code).inc()
        place.fail(
            QueueTimeout(
                f"The request has waited for the model for {self._network.queue_timeout} s, as long as "
                "network.queue_timeout allows. Try again when fewer requests wait."
            )
        )

    def _left(self, place: Place) -> None:
        self._places.remove(place)


class Place:
    """One request's. It waits until `begin()`, and can be ended from outside until `leave()`.

    Attributes:
        on_leave: called when the request has ended. It must not raise.
    """

    def __init__(self, queue: RequestQueue, owner: str, timeout: float) -> None:
        """For `RequestQueue.enter()`."""
        self.owner = owner
        self.on_leave: Callable[[], None] = lambda: None
        self._queue = queue
        self._waits = True
        self._error: ServerError | None = None
        self._give_up: GiveUp | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout, queue._timed_out, self) if timeout else None

    async def hold(self, handler: Awaitable[T]) -> T:
        """The result of the request's handler, which is cancelled when the request is to end before it is done.

        Raises:
            ServerError: why it was to end.
        """

        def cancel(error: ServerError) -> None:
            limit.reschedule(0.0)

        try:
            async with asyncio.timeout(None) as limit:
                self._give_up = cancel
                return await handler
        except BaseException as error:
            self._stop_waiting(begun=False)  # before its client hears of it, who may ask again at once
            if isinstance(error, TimeoutError) and self._error is not None:
                raise self._error from None
            raise
        finally:
            if self._give_up is cancel:
                self._give_up = None

    def hand_over(self, give_up: GiveUp) -> None:
        """From now on the request is ended by this call, which is told why."""
        self._give_up = give_up

    def begin(self) -> None:
        """An answer has begun: the request waits no longer."""
        self._stop_waiting(begun=True)

    def fail(self, error: ServerError) -> None:
        """End the request. The first error counts."""
        if self._error is None:
            self._error = error
            self._stop_waiting(begun=False)
            if self._give_up is not None:
                self._give_up(error)

    def leave(self) -> None:
        """The request has ended, in whatever way."""
        self._stop_waiting(begun=False)
        self._queue._left(self)
        self.on_leave()

    def _stop_waiting(self, *, begun: bool) -> None:
        if self._waits:
            self._waits = False
            if self._timer is not None:
                self._timer.cancel()
            self._queue._stops_waiting(self, begun=begun)


def place_of(request: Request) -> Place:
    """The place of a request that a `QueuedRoute` serves."""
    place = request.state.place
    assert isinstance(place, Place)
    return place
