"""The thread that chat templates run in, beside the server's loop, which serves everybody else meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Final, TypeAlias, TypeVar

from loguru import logger

from common.caching import EVERYBODY

T = TypeVar("T")

Work: TypeAlias = Callable[[], None]

# Whose request is being served; see `Caller.owner`. Tasks started while it is set inherit it.
prompt_owner: Final[ContextVar[str]] = ContextVar("prompt_owner", default=EVERYBODY)


class PromptThread:
    """Does one thing after the other: those of an owner in the order in which it is told to, the owners in turns.

    The turns of conversations are kept and read here alone, so they need no lock; and since an answer is told of before
    its client can send the next request, that request finds it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Work]] = {}  # by owner; whose turn is next comes first
        self._closed = False
        self._changed = threading.Condition()  # what is above
        # A daemon, as the end of the server does not wait for a template.
        self._thread = threading.Thread(target=self._serve, name="prompts", daemon=True)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of some work. It is not begun any more once the caller is cancelled."""
        result = Future[T]()

        def answer() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except BaseException as error:
                    result.set_exception(error)

        self._submit(answer)
        return await asyncio.wrap_future(result)

    def later(self, work: Work) -> None:
        """Have work done that nobody waits for."""

        def logged() -> None:
            try:
                work()
            except Exception as error:  # nobody else gets to know
                logger.opt(exception=error).error("What follows the end of an answer has failed")

        self._submit(logged)

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _submit(self, work: Work) -> None:
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            self._waiting.setdefault(prompt_owner.get(), deque()).append(partial(copy_context().run, work))
            self._changed.notify()

    def _serve(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            owner = next(iter(self._waiting))
            works = self._waiting.pop(owner)
            work = works.popleft()
            if works:
                self._waiting[owner] = works  # behind the others
        work()
        return True
