"""Server side of a process with a model in it, whatever the model does: start, calls, restart, close."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec
from loguru import logger

from backends import messages
from backends.engine_process import EngineProcess, Said
from common.errors import EngineFailed, ModelLoadFailed, ModelNotLoaded, RequestCancelled, ServerError

# Seconds before each attempt to bring a crashed engine back. A crash more than STABLE_SECONDS after the engine was
# ready begins anew; one that comes sooner goes on with the next delay, and past the last the model counts as failed.
RESTART_DELAYS = (0.0, 2.0, 10.0, 30.0)
STABLE_SECONDS = 30.0
# How long an engine that was told to exit, and has nothing to do but release the GPU, may say nothing before it is
# killed.
SHUTDOWN_SECONDS = 10.0

ClientState: TypeAlias = Literal["new", "prepared", "ready", "restarting", "failed", "closed"]
T = TypeVar("T")


class ProcessClient(Generic[Said]):
    """One process and the model in it.

    When the process dies on its own, or hangs and is ended, what was asked of it ends with `EngineFailed`, the process
    is started again and loads the same model; what is asked meanwhile waits for it. One that does not come back, or
    that dies as soon as it is back, is given up in the end: the state is then "failed".

    Attributes:
        directory: folder of the model.
        state: where in its life the client is.
        failure: why `state` is "restarting" or "failed".
        on_restart: called after each attempt to bring a crashed process back, with whether it is. It must not raise.
    """

    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # of what the process says
    takes_less_memory: ClassVar[str]  # with which settings, for a user whose system has killed it

    def __init__(self, directory: Path, command: Sequence[str], engine_timeout: float) -> None:
        """
        Args:
            directory: folder of the model.
            command: command line of the process.
            engine_timeout: seconds for which the process may say nothing while it has work, a load included, before it
                counts as hanging and is ended; 0: as long as it likes.
        """
        self.directory = directory
        self.state: ClientState = "new"
        self.failure: str | None = None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._command = tuple(command)
        self._engine_timeout = engine_timeout
        self._process: EngineProcess[Said] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._restarts = 0
        self._ready_at = 0.0
        self._settled = asyncio.Event()  # set while requests can be taken, or never will be
        self._load_events: asyncio.Queue[Said | EngineFailed] = asyncio.Queue()  # of this process
        self._loads = False  # or prepares
        self._calls: dict[str, asyncio.Future[Said]] = {}
        self._given_up: set[str] = set()  # ids of which nobody waits for the last message, which has not come
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._calls)

    # --- for subclasses -----------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Start the process and load the model. Raises `ServerError`; there is no process then."""
        raise NotImplementedError

    def _dispatch(self, message: Said) -> None:
        """Take a message of the process. What this raises ends the process."""
        raise NotImplementedError

    @property
    def _shutdown_seconds(self) -> float:
        """How long a process that was told to exit may say nothing."""
        return SHUTDOWN_SECONDS

    # --- life ---------------------------------------------------------------------------------------------------

    async def close(self, force: bool = False) -> None:
        """End the process; requests in flight get `RequestCancelled`. Safe to call at any time, more than once.

        Args:
            force: kill it, also where another call is waiting for it to end in order.
        """
        self.state = "closed"
        self._settled.set()
        if force and self._process is not None:
            self._process.kill()
        if self._restarter is not None and self._restarter is not asyncio.current_task():
            self._restarter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarter
        self._fail_everything(RequestCancelled(f"The model {self.name} was unloaded while it worked on this request."))
        await self._stop_process()

    def _is_ready(self) -> None:
        """The model is loaded."""
        self._ready_at = asyncio.get_running_loop().time()
        self.state = "ready"
        self._settled.set()

    async def _available(self) -> None:
        await self._settled.wait()
        if self.state != "ready":
            reason = f": {self.failure}" if self.failure else "."
            raise ModelNotLoaded(f"The model {self.name} is not loaded{reason}")

    # --- calls --------------------------------------------------------------------------------------------------

    async def _call(self, build: Callable[[str], msgspec.Struct], expected: type[T]) -> T:
        """The one answer to a message, which `build` makes with its id."""
        await self._available()
        return await self._ask_process(build, expected)

    async def _ask_process(self, build: Callable[[str], msgspec.Struct], expected: type[T]) -> T:
        """As `_call()`, also of a process that does not serve yet."""
        process = self._process
        if process is None:
            raise EngineFailed(f"The engine process of {self.name} has ended.")
        call_id = str(next(self._ids))
        future: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        self._write(build(call_id))
        self._calls[call_id] = future
        try:
            await self._drain()
            answer = await future
        finally:
            del self._calls[call_id]
            if (future.cancelled() or not future.done()) and self._process is process:
                self._give_up(call_id)
        if not isinstance(answer, expected):
            raise EngineFailed(f"The engine answered {type(answer).__name__} where {expected.__name__} was asked for.")
        return answer

    def _give_up(self, call_id: str) -> None:
        """Nobody waits any more for the answer to a call."""
        self._given_up.add(call_id)

    def _answered(self, call_id: str, message: Said) -> None:
        self._given_up.discard(call_id)
        if (call := self._calls.get(call_id)) is not None and not call.done():
            call.set_result(message)

    def _fail(self, message_id: str, error: ServerError) -> None:
        """What was asked with this id has ended without what it was to bring."""
        self._given_up.discard(message_id)
        if (call := self._calls.get(message_id)) is not None and not call.done():
            call.set_exception(error)

    def _fail_everything(self, error: ServerError) -> None:
        self._given_up.clear()
        for message_id in list(self._calls):
            self._fail(message_id, error)

    # --- the process --------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._loads or self._calls or self._given_up)

    async def _spawn(self) -> None:
        self._load_events = asyncio.Queue()
        process = await EngineProcess.start(
            self.name, self._command, self.decoder, self._dispatch, self.takes_less_memory
        )
        self._process = process
        # It outlives the request that has the model loaded, so it must not carry that request's id into the log.
        self._follower = asyncio.create_task(self._follow(process), context=contextvars.Context())

    async def _follow(self, process: EngineProcess[Said]) -> None:
        watchdog = None
        if self._engine_timeout:
            watchdog = asyncio.create_task(process.end_when_hanging(lambda: self._has_work, self._engine_timeout))
        await asyncio.wait({process.ended})
        if watchdog is not None:
            watchdog.cancel()
        if self._process is process:
            self._process = None
            self._ended(process.failure())

    def _write(self, message: msgspec.Struct) -> None:
        if self._process is not None:
            self._process.write(message)

    async def _drain(self) -> None:
        if self._process is not None:
            await self._process.drain()

    @contextlib.asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """The process is stopped where this is left by an error."""
        self._loads = True
        try:
            yield
        except BaseException:
            await self._stop_process()
            raise
        finally:
            self._loads = False

    async def _load_event(self) -> Said:
        event = await self._load_events.get()
        if isinstance(event, messages.LoadFailed):
            raise ServerError.from_record(event.error)
        if isinstance(event, EngineFailed):
            raise ModelLoadFailed(f"The engine process ended while it loaded {self.name}: {event.message}")
        return event

    def _got_load_event(self, message: Said) -> None:
        if self.state == "ready":
            raise ValueError(f"{type(message).__name__} of a process that does not load")
        self._load_events.put_nowait(message)

    def _ended(self, error: EngineFailed) -> None:
        self._load_events.put_nowait(error)
        if self.state != "ready":
            if self._loads:  # which may have asked it something
                self._fail_everything(error)
            return
        logger.error("{} Requests in flight: {}", error.message, self.running)
        self.state = "restarting"
        self.failure = error.message
        self._settled.clear()
        self._fail_everything(error)
        self._restarter = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        if asyncio.get_running_loop().time() - self._ready_at > STABLE_SECONDS:
            self._restarts = 0
        while self._restarts < len(RESTART_DELAYS):
            await asyncio.sleep(RESTART_DELAYS[self._restarts])
            self._restarts += 1
            logger.warning("Starting the engine of {} again, attempt {}", self.name, self._restarts)
            back = await self._come_back()
            self.on_restart(back)
            if back:
                return
        self.state = "failed"
        self.failure = (
            f"It was given up after {self._restarts} attempts to bring it back; load the model again. {self.failure}"
        )
        logger.critical("The engine of {} has failed. {}", self.name, self.failure)
        self._settled.set()

    async def _come_back(self) -> bool:
        try:
            await self._bring_up()
        except Exception as error:
            # Whatever it is, nobody else would hear of it.
            told = error if isinstance(error, ServerError) else None
            self.failure = told.message if told else f"Its engine could not be started: {type(error).__name__}."
            logger.opt(exception=None if told else error).error(
                "The engine of {} did not come back: {}", self.name, self.failure
            )
            return False
        self.failure = None
        logger.info("The engine of {} is back", self.name)
        return True

    async def _stop_process(self) -> None:
        process, follower = self._process, self._follower
        if process is None or follower is None:
            return
        process.write(messages.Shutdown())
        process.close_input()
        if self._loads:  # which it would go on with, and has nothing to keep yet
            process.kill()
        loop = asyncio.get_running_loop()
        limit = self._shutdown_seconds
        told_at = loop.time()
        while not follower.done():
            left = max(told_at, process.heard_at) + limit - loop.time()
            if left <= 0:
                logger.warning(
                    "The engine process of {} neither ends nor gets on in {} s; it is killed", self.name, limit
                )
                process.kill()
                break
            await asyncio.wait({follower}, timeout=left)
        await follower


def told_of_load(name: str, error: Exception) -> ServerError:
    """What a client is told of a load that has failed, which is logged here."""
    if isinstance(error, ServerError):
        logger.error("Loading {} failed: {}", name, error.message)
        return error
    logger.opt(exception=error).error("Loading {} failed for a reason that the server does not know", name)
    return ModelLoadFailed(f"Loading {name} failed: {type(error).__name__}. The server's log says more.")
