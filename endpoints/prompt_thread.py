"""The thread that chat templates run in, beside the server's loop, which serves everybody else meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from loguru import logger

T = TypeVar("T")


class PromptThread:
    """Does one thing after the other, in the order in which it is told to.

    The turns of conversations are kept and read here alone, so they need no lock; and since an answer is told of before
    its client can send the next request, that request finds it.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of some work. It is not begun any more once the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, work)

    def later(self, work: Callable[[], None]) -> None:
        """Have work done that nobody waits for."""

        def logged() -> None:
            try:
                work()
            except Exception as error:  # nobody else gets to know
                logger.opt(exception=error).error("What follows the end of an answer has failed")

        self._executor.submit(copy_context().run, logged)

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
