"""Server side of one engine process: start, call, stream, cancel, restart, close."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from loguru import logger

from backends import messages
from backends.messages import FromEngine, LoadProgress, ModelInfo, ToEngine
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import LoadSettings
from common.errors import EngineFailed, ModelLoadFailed, ModelNotLoaded, RequestCancelled, ServerError
from common.generation import Event, Finish, GenerationRequest, TextSpan

WORKER_COMMAND = (sys.executable, "-m", "backends.worker")
PROJECT_ROOT = Path(__file__).resolve().parent.parent

# Seconds before each attempt to bring a crashed engine back. A crash more than STABLE_SECONDS after the last start
# begins anew; one that comes sooner goes on with the next delay, and past the last the model counts as failed.
RESTART_DELAYS = (0.0, 2.0, 10.0)
STABLE_SECONDS = 60.0
# How long an engine that was told to exit may say nothing before it is killed: one that has nothing to do but release
# the GPU, and one that writes its cache to disk, which says how it gets on.
SHUTDOWN_SECONDS = 10.0
FLUSH_SECONDS = 60.0
STDERR_LINES_KEPT = 30

ClientState: TypeAlias = Literal["new", "prepared", "ready", "restarting", "failed", "closed"]
_BuildCall: TypeAlias = Callable[[str], ToEngine]


class Generation:
    """One running request: iterate for its events, `cancel()` to end it early.

    The iteration ends after a `Finish` or raises a `ServerError`. Use it as an async context manager: leaving the block
    cancels what has not finished, whatever the reason for leaving.
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._id = request_id
        self._events: asyncio.Queue[Event | ServerError] = asyncio.Queue()
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
            self._events.put_nowait(message.event)

    def _fail(self, error: ServerError) -> None:
        if not self._accepted.done():
            self._accepted.set_exception(error)
        self._events.put_nowait(error)


class EngineClient:
    """One engine process and the model in it.

    Life: `prepare()` -> `load()` -> any number of `generate()`, `encode()`, `decode()` -> `close()`. When the process
    dies on its own, the requests in flight get `EngineFailed`, the process is started again and loads the same model;
    requests that come meanwhile wait for it.

    Attributes:
        directory: folder of the model.
        settings: what the model is, or will be, loaded with.
        info: the loaded model; set once `load()` has ended.
        plan: what checkpoints of the model cost; set by `prepare()`, and again by `load()`, which may measure for it.
            None: it has no recurrent layers.
        state: where in its life the client is.
        failure: why `state` is "failed".
        on_restart: called after each attempt to bring a crashed engine back, with whether it is. It must not raise.
    """

    def __init__(self, directory: Path, settings: LoadSettings, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.directory = directory
        self.settings = settings
        self.info: ModelInfo | None = None
        self.plan: PlanBasis | None = None
        self.state: ClientState = "new"
        self.failure: str | None = None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._restarts = 0
        self._started_at = 0.0
        self._heard_at = 0.0  # when the process last said something
        self._settled = asyncio.Event()  # set while requests can be taken, or never will be
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_events: asyncio.Queue[FromEngine | EngineFailed] = asyncio.Queue()
        self._generations: dict[str, Generation] = {}
        self._calls: dict[str, asyncio.Future[FromEngine]] = {}
        self._ids = itertools.count(1)
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES_KEPT)

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
            ServerError: what is wrong with them, or `ModelLoadFailed` if the process died. It has ended then.
        """
        try:
            await self._spawn()
            await self._send(
                messages.Prepare(directory=str(self.directory), settings=self.settings.model_dump_json().encode())
            )
            answer = await self._load_event()
            if not isinstance(answer, messages.Prepared):
                raise ModelLoadFailed(f"The engine answered {type(answer).__name__} when asked to prepare {self.name}.")
        except BaseException:
            await self._stop_process()
            raise
        self.plan = answer.plan
        self.state = "prepared"

    async def load(self) -> AsyncIterator[LoadProgress]:
        """Load the prepared model, yielding progress. Errors as for `prepare()`."""
        try:
            await self._send(messages.Load())
            while not isinstance(event := await self._load_event(), messages.Loaded):
                if isinstance(event, LoadProgress):
                    yield event
        except BaseException:
            await self._stop_process()
            raise
        self.info = event.info
        self.plan = event.plan
        self._started_at = asyncio.get_running_loop().time()
        self.state = "ready"
        self._settled.set()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def close(self) -> None:
        """End the process; requests in flight get `RequestCancelled`. Safe to call at any time, more than once."""
        self.state = "closed"
        self._settled.set()
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
        self._generations[request_id] = generation
        self._idle.clear()
        try:
            await self._send(messages.Generate(id=request_id, request=request))
        except BaseException:  # the caller was cancelled: nobody will read what the engine may have been told to write
            self._forget(request_id)
            self._write(messages.Cancel(id=request_id))
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
            )
        )
        assert isinstance(answer, messages.Encoded)
        return answer.tokens

    async def decode(self, tokens: list[int], *, decode_special_tokens: bool = True) -> str:
        """Text of token ids. Raises `InvalidRequest` for ids outside the vocabulary."""
        answer = await self._call(
            lambda call_id: messages.Decode(id=call_id, tokens=tokens, decode_special_tokens=decode_special_tokens)
        )
        assert isinstance(answer, messages.Decoded)
        return answer.text

    async def pieces(self, tokens: list[int]) -> list[bytes]:
        """What each token adds to a text. Raises `InvalidRequest` for ids outside the vocabulary."""
        answer = await self._call(lambda call_id: messages.Split(id=call_id, tokens=tokens))
        assert isinstance(answer, messages.Pieces)
        return answer.pieces

    async def inspect(self) -> CacheState:
        """What the engine has cached at this moment."""
        answer = await self._call(lambda call_id: messages.Inspect(id=call_id))
        assert isinstance(answer, messages.Inspected)
        return answer.state

    async def explain(self, request: GenerationRequest) -> CacheExplanation:
        """How much of a prompt would be processed, without starting it. Raises `ServerError` as `generate()` does."""
        answer = await self._call(lambda call_id: messages.Explain(id=call_id, request=request))
        assert isinstance(answer, messages.Explained)
        return answer.explanation

    async def flush_cache(self) -> CacheChange:
        """Write everything to the disk tier, and wait until it is there. Raises `InvalidRequest` without that tier."""
        answer = await self._call(lambda call_id: messages.FlushCache(id=call_id))
        assert isinstance(answer, messages.CacheChanged)
        return answer.change

    async def clear_cache(self) -> CacheChange:
        """Drop everything that no running request uses, in all tiers, and what is known of earlier prompts."""
        answer = await self._call(lambda call_id: messages.ClearCache(id=call_id))
        assert isinstance(answer, messages.CacheChanged)
        return answer.change

    async def _call(self, build: _BuildCall) -> FromEngine:
        await self._available()
        call_id = str(next(self._ids))
        future: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(build(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _available(self) -> None:
        await self._settled.wait()
        if self.state != "ready":
            reason = f": {self.failure}" if self.failure else ""
            raise ModelNotLoaded(f"The model {self.name} is not loaded{reason}")

    async def _cancel(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is None:
            return
        self._forget(request_id)
        generation._fail(RequestCancelled("The request was cancelled."))
        await self._send(messages.Cancel(id=request_id))

    def _forget(self, request_id: str) -> Generation | None:
        generation = self._generations.pop(request_id, None)
        if not self._generations:
            self._idle.set()
        return generation

    # --- the process --------------------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        self._load_events = asyncio.Queue()
        self._stderr.clear()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=PROJECT_ROOT,
        )
        self._process = process
        # It outlives the request that has the model loaded, so it must not carry that request's id into the log.
        self._watcher = asyncio.create_task(self._watch(process), context=contextvars.Context())

    async def _send(self, message: ToEngine) -> None:
        pipe = self._write(message)
        if pipe is not None:
            # A process that has just died is noticed, and its requests failed, by the watcher.
            with contextlib.suppress(ConnectionError):
                await pipe.drain()

    def _write(self, message: ToEngine) -> asyncio.StreamWriter | None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is not None:
            pipe.write(messages.frame(message))
        return pipe

    async def _load_event(self) -> FromEngine:
        event = await self._load_events.get()
        if isinstance(event, messages.LoadFailed):
            raise ServerError.from_record(event.error)
        if isinstance(event, EngineFailed):
            raise ModelLoadFailed(f"The engine process ended while it loaded {self.name}: {event.message}")
        return event

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Read everything the process says until it ends, then tell whoever waits for it."""
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(self._read_stderr(process.stderr))
        try:
            while True:
                header = await process.stdout.readexactly(messages.HEADER_BYTES)
                body = await process.stdout.readexactly(messages.body_length(header))
                self._heard_at = asyncio.get_running_loop().time()
                self._dispatch(messages.from_engine_decoder.decode(body))
        except asyncio.IncompleteReadError:
            pass  # the pipe is closed: the process ends, or has ended
        except Exception:
            logger.exception("The engine process of {} sent what cannot be read; it is ended", self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        await errors
        if self._process is process:
            self._process = None
            self._ended(code)

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit: it is dropped, the rest is not
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._stderr.append(text)
            logger.info("[engine {}] {}", self.name, text)

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
                error = ServerError.from_record(record)
                if (call := self._calls.get(request_id)) is not None:
                    if not call.done():
                        call.set_exception(error)
                elif (generation := self._forget(request_id)) is not None:
                    generation._fail(error)
            case (
                messages.Encoded(id=call_id)
                | messages.Decoded(id=call_id)
                | messages.Pieces(id=call_id)
                | messages.Inspected(id=call_id)
                | messages.Explained(id=call_id)
                | messages.CacheChanged(id=call_id)
            ):
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_result(message)
            case messages.Log(level=level, message=text):
                logger.log(level, "[engine {}] {}", self.name, text)
            case _:
                self._load_events.put_nowait(message)

    def _ended(self, code: int) -> None:
        said = f" Its last words: {self._stderr[-1]}" if self._stderr else ""
        error = EngineFailed(f"The engine process of {self.name} ended with code {code}.{said}")
        self._load_events.put_nowait(error)
        if self.state != "ready":
            return
        logger.error("{} Requests in flight: {}", error.message, self.running)
        self._fail_everything(error)
        self.state = "restarting"
        self._settled.clear()
        self._restarter = asyncio.create_task(self._restart())

    def _fail_everything(self, error: ServerError) -> None:
        for request_id in list(self._generations):
            generation = self._forget(request_id)
            assert generation is not None
            generation._fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    async def _restart(self) -> None:
        if asyncio.get_running_loop().time() - self._started_at > STABLE_SECONDS:
            self._restarts = 0
        while self._restarts < len(RESTART_DELAYS):
            await asyncio.sleep(RESTART_DELAYS[self._restarts])
            self._restarts += 1
            logger.warning("Starting the engine of {} again, attempt {}", self.name, self._restarts)
            try:
                await self.prepare()
                async for _ in self.load():
                    pass
            except ServerError as error:
                self.failure = error.message
                self.state = "restarting"
                logger.error("The engine of {} did not come back: {}", self.name, error.message)
                self.on_restart(False)
            else:
                self.failure = None
                logger.info("The engine of {} is back", self.name)
                self.on_restart(True)
                return
        self.state = "failed"
        self.failure = self.failure or "its engine process keeps crashing"
        self._settled.set()

    async def _stop_process(self) -> None:
        process, watcher = self._process, self._watcher
        if process is None or watcher is None:
            return
        await self._send(messages.Shutdown())
        if process.stdin is not None:
            process.stdin.close()
        loop = asyncio.get_running_loop()
        limit = FLUSH_SECONDS if self.settings.memory.disk_cache_dir else SHUTDOWN_SECONDS
        told_at = loop.time()
        while not watcher.done():
            left = max(told_at, self._heard_at) + limit - loop.time()
            if left <= 0:
                logger.warning(
                    "The engine process of {} neither ends nor gets on in {} s; it is killed", self.name, limit
                )
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                break
            await asyncio.wait({watcher}, timeout=left)
        await watcher
