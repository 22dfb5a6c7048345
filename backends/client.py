"""Server side of one engine process: start, call, stream, cancel, restart, close."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias, TypeVar

from loguru import logger

from backends import messages
from backends.engine_process import EngineProcess
from backends.messages import FromEngine, LoadProgress, ModelInfo, ToEngine
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import LoadSettings
from common.errors import EngineFailed, ModelLoadFailed, ModelNotLoaded, RequestCancelled, ServerError
from common.generation import Event, Finish, GenerationRequest, TextSpan

WORKER_COMMAND = (sys.executable, "-m", "backends.worker")

# Seconds before each attempt to bring a crashed engine back. A crash more than STABLE_SECONDS after the engine was
# ready begins anew; one that comes sooner goes on with the next delay, and past the last the model counts as failed.
RESTART_DELAYS = (0.0, 2.0, 10.0, 30.0)
STABLE_SECONDS = 30.0
# How long an engine that was told to exit may say nothing before it is killed: one that has nothing to do but release
# the GPU, and one that writes its cache to disk, which says how it gets on.
SHUTDOWN_SECONDS = 10.0
FLUSH_SECONDS = 60.0

ClientState: TypeAlias = Literal["new", "prepared", "ready", "restarting", "failed", "closed"]
T = TypeVar("T")


class Generation:
    """One running request: iterate for its events or `follow()` them, `cancel()` to end it early.

    The iteration ends after a `Finish` or raises a `ServerError`. Use it as an async context manager: leaving the block
    cancels what has not finished, whatever the reason for leaving.
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._id = request_id
        self._events: asyncio.Queue[Event | ServerError] = asyncio.Queue()
        self._hand_on: Callable[[Event | ServerError], None] = self._events.put_nowait
        self._accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # An error that nobody waits for here is raised by the iteration; asyncio need not complain about it.
        self._accepted.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def accepted(self) -> int:
        """Wait until the engine has tokenised, checked and queued the prompt.

        Returns:
            Tokens of the prompt.

        Raises:
            ServerError: the engine refused the request, `ContextLengthExceeded` for example.
        """
        return await asyncio.shield(self._accepted)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, ServerError):
                raise event
            yield event
            if isinstance(event, Finish):
                return

    def follow(self, receive: Callable[[Event | ServerError], None]) -> None:
        """Instead of iterating: have each event, those that have come included, handed to a function when it comes.

        Args:
            receive: must not raise. A `Finish` or an error is the last that it gets.
        """
        while not self._events.empty():
            receive(self._events.get_nowait())
        self._hand_on = receive

    async def cancel(self) -> None:
        """End the request; a reader of the events gets `RequestCancelled`. Does nothing after the end."""
        await self._client._cancel(self._id)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def _receive(self, message: messages.Accepted | messages.Produced) -> None:
        if isinstance(message, messages.Accepted):
            if not self._accepted.done():
                self._accepted.set_result(message.prompt_tokens)
        else:
            self._hand_on(message.event)

    def _fail(self, error: ServerError) -> None:
        if not self._accepted.done():
            self._accepted.set_exception(error)
        self._hand_on(error)


class EngineClient:
    """One engine process and the model in it.

    Life: `prepare()` -> `load()` -> any number of `generate()`, `encode()`, `decode()` -> `close()`. When the process
    dies on its own, or hangs and is ended, the requests in flight get `EngineFailed`, the process is started again and
    loads the same model; requests that come meanwhile wait for it. An engine that does not come back, or that dies as
    soon as it is back, is given up in the end: the state is then "failed".

    Attributes:
        directory: folder of the model.
        settings: what the model is, or will be, loaded with.
        info: the loaded model; set once `load()` has ended.
        plan: what checkpoints of the model cost; set by `prepare()`, and again by `load()`, which may measure for it.
            None: it has no recurrent layers.
        state: where in its life the client is.
        failure: why `state` is "restarting" or "failed".
        on_restart: called after each attempt to bring a crashed engine back, with whether it is. It must not raise.
    """

    def __init__(
        self,
        directory: Path,
        settings: LoadSettings,
        command: Sequence[str] = WORKER_COMMAND,
        *,
        engine_timeout: float = 0,
    ) -> None:
        """
        Args:
            directory: folder of the model.
            settings: what to load it with.
            command: command line of the process.
            engine_timeout: seconds for which the process may say nothing while it has work, a load included, before it
                counts as hanging and is ended; 0: as long as it likes.
        """
        self.directory = directory
        self.settings = settings
        self.info: ModelInfo | None = None
        self.plan: PlanBasis | None = None
        self.state: ClientState = "new"
        self.failure: str | None = None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._command = tuple(command)
        self._engine_timeout = engine_timeout
        self._process: EngineProcess | None = None
        self._follower: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._restarts = 0
        self._ready_at = 0.0
        self._settled = asyncio.Event()  # set while requests can be taken, or never will be
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_events: asyncio.Queue[FromEngine | EngineFailed] = asyncio.Queue()  # of this process
        self._loads = False  # or prepares
        self._generations: dict[str, Generation] = {}
        self._calls: dict[str, asyncio.Future[FromEngine]] = {}
        self._given_up: set[str] = set()  # ids of which nobody waits for the last message, which has not come
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._generations)

    # --- life ---------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Start the process and have it check model and settings, without loading.

        Raises:
            ServerError: what is wrong with them, or `ModelLoadFailed` if the process could not be started, died, or was
                ended as it hung. There is no process then.
        """
        async with self._loading():
            await self._spawn()
            self._write(
                messages.Prepare(directory=str(self.directory), settings=self.settings.model_dump_json().encode())
            )
            answer = await self._load_event()
            if not isinstance(answer, messages.Prepared):
                raise ModelLoadFailed(f"The engine answered {type(answer).__name__} when asked to prepare {self.name}.")
        self.plan = answer.plan
        if self.state == "new":
            self.state = "prepared"

    async def check_prepared(self) -> None:
        """Raise `ModelLoadFailed` where the process has ended since `prepare()`."""
        if self._process is None:
            await self._load_event()  # which says why

    async def load(self) -> AsyncIterator[LoadProgress]:
        """Load the prepared model, yielding progress. Errors as for `prepare()`."""
        async with self._loading():
            self._write(messages.Load())
            while not isinstance(event := await self._load_event(), messages.Loaded):
                if isinstance(event, LoadProgress):
                    yield event
        self.info = event.info
        self.plan = event.plan
        self._ready_at = asyncio.get_running_loop().time()
        self.state = "ready"
        self._settled.set()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

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

    # --- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Hand a request to the engine. Returns at once; see `Generation.accepted()`.

        Raises:
            ModelNotLoaded: the model is gone or could not be brought back.
        """
        await self._available()
        request_id = str(next(self._ids))
        generation = Generation(self, request_id)
        self._write(messages.Generate(id=request_id, request=request))
        self._generations[request_id] = generation
        self._idle.clear()
        try:
            await self._drain()
        except BaseException:  # the caller was cancelled: nobody will read what the engine has been told to write
            await self._cancel(request_id)
            raise
        return generation

    async def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        encode_special_tokens: bool = True,
        literals: Sequence[TextSpan] = (),
    ) -> list[int]:
        """Token ids of a text; the arguments mean what the fields of `GenerationRequest` do."""
        answer = await self._call(
            lambda call_id: messages.Encode(
                id=call_id,
                text=text,
                add_bos=add_bos,
                encode_special_tokens=encode_special_tokens,
                literals=list(literals),
            ),
            messages.Encoded,
        )
        return answer.tokens

    async def decode(self, tokens: list[int], *, decode_special_tokens: bool = True) -> str:
        """Text of token ids. Raises `InvalidRequest` for ids outside the vocabulary."""
        answer = await self._call(
            lambda call_id: messages.Decode(id=call_id, tokens=tokens, decode_special_tokens=decode_special_tokens),
            messages.Decoded,
        )
        return answer.text

    async def pieces(self, tokens: list[int]) -> list[bytes]:
        """What each token adds to a text. Raises `InvalidRequest` for ids outside the vocabulary."""
        answer = await self._call(lambda call_id: messages.Split(id=call_id, tokens=tokens), messages.Pieces)
        return answer.pieces

    async def inspect(self) -> CacheState:
        """What the engine has cached at this moment."""
        answer = await self._call(lambda call_id: messages.Inspect(id=call_id), messages.Inspected)
        return answer.state

    async def explain(self, request: GenerationRequest) -> CacheExplanation:
        """How much of a prompt would be processed, without starting it. Raises `ServerError` as `generate()` does."""
        answer = await self._call(lambda call_id: messages.Explain(id=call_id, request=request), messages.Explained)
        return answer.explanation

    async def flush_cache(self) -> CacheChange:
        """Write everything to the disk tier, and wait until it is there. Raises `InvalidRequest` without that tier."""
        answer = await self._call(lambda call_id: messages.FlushCache(id=call_id), messages.CacheChanged)
        return answer.change

    async def clear_cache(self) -> CacheChange:
        """Drop everything that no running request uses, in all tiers, and what is known of earlier prompts."""
        answer = await self._call(lambda call_id: messages.ClearCache(id=call_id), messages.CacheChanged)
        return answer.change

    async def _call(self, build: Callable[[str], ToEngine], expected: type[T]) -> T:
        await self._available()
        call_id = str(next(self._ids))
        future: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()
        process = self._process
        self._write(build(call_id))
        self._calls[call_id] = future
        try:
            await self._drain()
            answer = await future
        finally:
            del self._calls[call_id]
            if (future.cancelled() or not future.done()) and self._process is process:
                self._given_up.add(call_id)
        if not isinstance(answer, expected):
            raise EngineFailed(f"The engine answered {type(answer).__name__} where {expected.__name__} was asked for.")
        return answer

    async def _available(self) -> None:
        await self._settled.wait()
        if self.state != "ready":
            reason = f": {self.failure}" if self.failure else "."
            raise ModelNotLoaded(f"The model {self.name} is not loaded{reason}")

    async def _cancel(self, request_id: str) -> None:
        generation = self._forget(request_id)
        if generation is None:
            return
        generation._fail(RequestCancelled("The request was cancelled."))
        self._given_up.add(request_id)
        # Without waiting: the engine may hang, and read nothing.
        self._write(messages.Cancel(id=request_id))

    def _forget(self, request_id: str) -> Generation | None:
        self._given_up.discard(request_id)
        generation = self._generations.pop(request_id, None)
        if not self._generations:
            self._idle.set()
        return generation

    # --- the process --------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._loads or self._generations or self._calls or self._given_up)

    async def _spawn(self) -> None:
        self._load_events = asyncio.Queue()
        process = await EngineProcess.start(self.name, self._command, self._dispatch)
        self._process = process
        # It outlives the request that has the model loaded, so it must not carry that request's id into the log.
        self._follower = asyncio.create_task(self._follow(process), context=contextvars.Context())

    async def _follow(self, process: EngineProcess) -> None:
        watchdog = None
        if self._engine_timeout:
            watchdog = asyncio.create_task(process.end_when_hanging(lambda: self._has_work, self._engine_timeout))
        await asyncio.wait({process.ended})
        if watchdog is not None:
            watchdog.cancel()
        if self._process is process:
            self._process = None
            self._ended(process.failure())

    def _write(self, message: ToEngine) -> None:
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

    async def _load_event(self) -> FromEngine:
        event = await self._load_events.get()
        if isinstance(event, messages.LoadFailed):
            raise ServerError.from_record(event.error)
        if isinstance(event, EngineFailed):
            raise ModelLoadFailed(f"The engine process ended while it loaded {self.name}: {event.message}")
        return event

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case messages.Produced(id=request_id, event=event):
                generation = (
                    self._forget(request_id) if isinstance(event, Finish) else self._generations.get(request_id)
                )
                if generation is not None:  # else: cancelled here, and the engine does not know yet
                    generation._receive(message)
            case messages.Accepted(id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    generation._receive(message)
            case messages.Failed(id=request_id, error=record):
                self._fail(request_id, ServerError.from_record(record))
            case messages.Cancelled(id=request_id):
                self._fail(request_id, RequestCancelled("The engine ended the request before it was done."))
            case (
                messages.Encoded(id=call_id)
                | messages.Decoded(id=call_id)
                | messages.Pieces(id=call_id)
                | messages.Inspected(id=call_id)
                | messages.Explained(id=call_id)
                | messages.CacheChanged(id=call_id)
            ):
                self._given_up.discard(call_id)
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_result(message)
            case messages.Log(level=level, message=text):
                logger.log(level, "[engine {}] {}", self.name, text)
            case messages.Prepared() | messages.LoadProgress() | messages.Loaded() | messages.LoadFailed():
                if self.state == "ready":
                    raise ValueError(f"{type(message).__name__} of a process that does not load")
                self._load_events.put_nowait(message)

    def _fail(self, message_id: str, error: ServerError) -> None:
        """A request or a call has ended without what it was to bring."""
        if (call := self._calls.get(message_id)) is not None:
            if not call.done():
                call.set_exception(error)
        elif (generation := self._forget(message_id)) is not None:
            generation._fail(error)

    def _ended(self, error: EngineFailed) -> None:
        self._load_events.put_nowait(error)
        if self.state != "ready":
            return
        logger.error("{} Requests in flight: {}", error.message, self.running)
        self.state = "restarting"
        self.failure = error.message
        self._settled.clear()
        self._fail_everything(error)
        self._restarter = asyncio.create_task(self._restart())

    def _fail_everything(self, error: ServerError) -> None:
        self._given_up.clear()
        for message_id in [*self._generations, *self._calls]:
            self._fail(message_id, error)

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
            await self.prepare()
            async for _ in self.load():
                pass
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
        limit = FLUSH_SECONDS if self.settings.memory.disk_cache_dir else SHUTDOWN_SECONDS
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
