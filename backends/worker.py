"""Engine side of one engine process: `python -m backends.worker`.

Reads messages from stdin, drives a container, writes messages to stdout. The event loop runs in the main thread, and
the engine in that loop: one thread alone calls torch, with a second one decoding gets two to three times slower. Two
other threads touch only bytes: the one that reads stdin, and the interpreter's end when stdin closes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

import msgspec
from loguru import logger

from backends import messages
from backends.messages import FromEngine, LoadProgress, ModelInfo, ToEngine
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import LoadSettings
from common.errors import EngineFailed, EngineOutOfMemory, ErrorRecord, ModelLoadFailed, ServerError
from common.generation import Event, Finish, GenerationRequest, TextSpan
from common.hidden_paths import hide_paths
from common.logger import ToLoguru

if TYPE_CHECKING:
    from loguru import Message


# What torch's allocators, CUDA and the engine's own loader say when memory runs out.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "insufficient vram")
MODEL_TOO_LARGE = (
    "there is not enough memory to load it. Lower cache_size or max_seq_len, take a smaller cache_mode such as Q8 or "
    "Q4, lower chunk_size or max_batch_size, spread the model with gpu_split or leave more room with "
    "autosplit_reserve, or take a smaller model."
)
MODEL_IS_STRANGE = "Its files may be damaged, or of a kind that the engine does not know; the server's log says more."
REQUEST_TOO_LARGE = (
    "The engine ran out of memory over this request. Send a shorter prompt, or load the model with a smaller "
    "chunk_size, cache_size or max_batch_size."
)


class Job(Protocol):
    """One request that the engine has taken."""

    prompt_tokens: int

    def events(self) -> AsyncIterator[Event]:
        """Ends after a `Finish`, or raises."""

    async def cancel(self) -> None:
        """Ends the job and frees what it holds; `events()` then ends without a `Finish`. Harmless after the end."""


class Container(Protocol):
    """One model and everything that it needs to generate.

    The calls come in the order of the methods, all from one thread. `ServerError`s are for the user; anything else is
    a defect, or the engine's failure.

    Attributes:
        on_results: to be called when a job has something for its `events()`, and their reader has been woken for it.
    """

    on_results: Callable[[], None]

    def plan_basis(self) -> PlanBasis | None:
        """What checkpoints cost and where they fall; None without recurrent layers."""

    def load(self) -> Iterator[LoadProgress]:
        """Read the weights."""

    async def create_generator(self) -> None:
        """Make the loaded model ready for `start()`. Needs a running loop."""

    def info(self) -> ModelInfo: ...

    def start(self, request: GenerationRequest) -> Job:
        """Tokenise, check and queue. Raises `ServerError` for a request that cannot be served."""

    def encode(
        self, text: str, *, add_bos: bool | None, encode_special_tokens: bool, literals: Sequence[TextSpan]
    ) -> list[int]: ...

    def decode(self, tokens: list[int], *, decode_special_tokens: bool) -> str: ...

    def pieces(self, tokens: list[int]) -> list[bytes]:
        """What each token adds to a text."""

    def cache_state(self) -> CacheState:
        """What is cached at this moment."""

    def explain(self, request: GenerationRequest) -> CacheExplanation:
        """What a request would find in the caches. Raises `ServerError` for one that cannot be served."""

    async def flush(self) -> CacheChange:
        """Write everything to the disk tier, while requests go on. Raises `ServerError` where there is none."""

    async def clear(self) -> CacheChange:
        """Drop everything that no running request uses, in all tiers."""

    def broken(self) -> bool:
        """Whether the engine failed as a whole, so that only a new process helps."""

    async def unload(self) -> None: ...


class CreateContainer(Protocol):
    def __call__(self, directory: Path, settings: LoadSettings) -> Container:
        """Check everything that can be checked without loading. Raises `ServerError`."""


# Answered in the turn of the loop in which they come.
Call: TypeAlias = messages.Encode | messages.Decode | messages.Split | messages.Inspect | messages.Explain


class Worker:
    """Carries messages between a pipe pair and a container until told to stop."""

    def __init__(self, create: CreateContainer, incoming: FileIO, outgoing: BinaryIO) -> None:
        self._create = create
        self._incoming = incoming
        self._outgoing = outgoing
        self._inbox: asyncio.Queue[ToEngine] = asyncio.Queue()  # of a process that does not serve yet
        self._receive: Callable[[ToEngine], None] = self._inbox.put_nowait
        self._stopped = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._flushing: asyncio.Handle | None = None  # of what is written and not flushed

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="stdin", daemon=True).start()
        logger.remove()
        logger.add(
            partial(self._tell, loop),
            level="DEBUG",  # the server keeps what its own settings ask for
            format="{message}",
            backtrace=False,
            diagnose=False,  # values of variables may be prompts
        )
        # The engine's own warnings, as of a disk tier that cannot be written any more.
        logging.basicConfig(handlers=[ToLoguru()], level=logging.WARNING, force=True)
        try:
            container = await self._bring_up()
        except ServerError as error:
            self._send(
                messages.LoadFailed(error=msgspec.structs.replace(error.to_record(), message=hide_paths(error.message)))
            )
            return
        if container is not None:
            await self._serve(container)

    async def _bring_up(self) -> Container | None:
        """Prepare and load as the server asks; None when it changed its mind."""
        message = await self._inbox.get()
        if not isinstance(message, messages.Prepare):
            return None
        directory = Path(message.directory)
        try:
            container = self._create(directory, LoadSettings.model_validate_json(message.settings))
            self._send(messages.Prepared(plan=container.plan_basis()))
            if not isinstance(await self._inbox.get(), messages.Load):
                return None
            for progress in container.load():
                self._send(progress)
            await container.create_generator()
        except ServerError:
            raise
        except Exception as error:
            # Whatever the engine raises over a model is the user's to know: which file, which memory, which shape.
            logger.opt(exception=error).error("Loading {} failed", directory.name)
            reason = MODEL_TOO_LARGE if is_out_of_memory(error) else f"{_summary(error)}. {MODEL_IS_STRANGE}"
            raise ModelLoadFailed(f"{directory.name}: {reason}") from error
        self._send(messages.Loaded(info=container.info(), plan=container.plan_basis()))
        return container

    async def _serve(self, container: Container) -> None:
        """Take requests until told to stop.

        A message is handled in the turn of the loop in which it comes: between two turns lies a step of the engine,
        which may be a whole prefill chunk.
        """
        self._receive = partial(self._handle, container)
        container.on_results = self._flush_last
        while not self._inbox.empty():
            self._receive(self._inbox.get_nowait())
        await self._stopped.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await container.unload()

    def _handle(self, container: Container, message: ToEngine) -> None:
        match message:
            case messages.Generate(id=request_id, request=request):
                self._start(container, request_id, request)
            case messages.Cancel(id=request_id):
                self._cancel(request_id)
            case messages.Encode() | messages.Decode() | messages.Split() | messages.Inspect() | messages.Explain():
                self._send(self._answer(container, message))
            case messages.FlushCache(id=call_id):
                self._run(call_id, self._change_cache(call_id, container.flush))
            case messages.ClearCache(id=call_id):
                self._run(call_id, self._change_cache(call_id, container.clear))
            case messages.Shutdown():
                self._stopped.set()
            case _:
                logger.error("The engine process got {} while it serves", type(message).__name__)

    def _start(self, container: Container, request_id: str, request: GenerationRequest) -> None:
        try:
            job = container.start(request)
        except Exception as error:
            self._send(messages.Failed(id=request_id, error=_record(error)))
            return
        # In this order, so that the job begins before what is sent once it is known to be accepted.
        self._run(request_id, self._pump(container, request_id, job))
        self._send(messages.Accepted(id=request_id, prompt_tokens=job.prompt_tokens))

    def _run(self, message_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[message_id] = task
        task.add_done_callback(lambda done: self._tasks.pop(message_id, None))

    def _cancel(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is None:  # it has ended
            self._send(messages.Cancelled(id=request_id))
            return
        # Not before the task has begun, which would never get to what it does in the end.
        asyncio.get_running_loop().call_soon(task.cancel)

    async def _pump(self, container: Container, request_id: str, job: Job) -> None:
        finished = False
        try:
            async for event in job.events():
                self._write(messages.Produced(id=request_id, event=event))
                finished = isinstance(event, Finish)
        except Exception as error:
            self._send(messages.Failed(id=request_id, error=_record(error)))
            finished = True
            if container.broken():
                logger.critical("The engine failed as a whole; its process ends and is started again")
                # Every other job has got the same error and reports it in this turn of the loop.
                asyncio.get_running_loop().call_later(0.1, os._exit, 1)
        finally:
            await _end(job)
            if not finished:
                self._send(messages.Cancelled(id=request_id))

    async def _change_cache(self, call_id: str, change: Callable[[], Coroutine[Any, Any, CacheChange]]) -> None:
        try:
            self._send(messages.CacheChanged(id=call_id, change=await change()))
        except Exception as error:
            self._send(messages.Failed(id=call_id, error=_record(error)))

    def _answer(self, container: Container, call: Call) -> FromEngine:
        try:
            match call:
                case messages.Encode():
                    tokens = container.encode(
                        call.text,
                        add_bos=call.add_bos,
                        encode_special_tokens=call.encode_special_tokens,
                        literals=call.literals,
                    )
                    return messages.Encoded(id=call.id, tokens=tokens)
                case messages.Decode():
                    text = container.decode(call.tokens, decode_special_tokens=call.decode_special_tokens)
                    return messages.Decoded(id=call.id, text=text)
                case messages.Split():
                    return messages.Pieces(id=call.id, pieces=container.pieces(call.tokens))
                case messages.Inspect():
                    return messages.Inspected(id=call.id, state=container.cache_state())
                case messages.Explain():
                    return messages.Explained(id=call.id, explanation=container.explain(call.request))
        except Exception as error:
            return messages.Failed(id=call.id, error=_record(error))

    def _tell(self, loop: asyncio.AbstractEventLoop, entry: Message) -> None:
        """Send a line of the log, in the loop's thread: the engine has others, which log too."""
        message = messages.Log(level=entry.record["level"].name, message=str(entry).rstrip())
        if threading.current_thread() is threading.main_thread():
            self._send(message)
            return
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: FromEngine) -> None:
        self._outgoing.write(messages.frame(message))
        self._flush()

    def _write(self, message: FromEngine) -> None:
        """Send a message together with others of this turn of the loop."""
        self._outgoing.write(messages.frame(message))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush_last(self) -> None:
        """Flush as soon as all that has been woken so far has run: what a step of the engine gave, before the next."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        # Blocks when the server does not read: the engine shall not run ahead of it without bounds.
        self._outgoing.flush()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._read_messages(loop)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a process that does not hear any more is of no use

    def _read_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            length = messages.body_length(self._read_exactly(messages.HEADER_BYTES))
            message = messages.to_engine_decoder.decode(self._read_exactly(length))
            try:
                loop.call_soon_threadsafe(self._deliver, message)
            except RuntimeError:  # the loop is closed: the model cannot be loaded, and the process ends by itself
                return
            if isinstance(message, messages.Shutdown):
                return

    def _deliver(self, message: ToEngine) -> None:
        self._receive(message)

    def _read_exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._incoming.read(count - len(parts))
            if not part:
                os._exit(0)  # the parent is gone; nobody wants what the engine may be busy with
            parts += part
        return bytes(parts)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the host or of a GPU. By name and text: this module does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def _record(error: Exception) -> ErrorRecord:
    if isinstance(error, ServerError):
        return error.to_record()
    logger.opt(exception=error).error("A request failed in the engine")
    if is_out_of_memory(error):
        return EngineOutOfMemory(REQUEST_TOO_LARGE).to_record()
    return EngineFailed(f"The engine failed on this request: {_summary(error)}").to_record()


async def _end(job: Job) -> None:
    try:
        await job.cancel()
    except Exception:
        logger.exception("A request could not be ended in order")


def _summary(error: Exception) -> str:
    """What went wrong, without the C++ stack that torch adds, and without the places of files."""
    return hide_paths(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def run(create: CreateContainer) -> None:
    """Serve one server process over this process's stdin and stdout."""
    # Ctrl-C in a terminal reaches every process of the group; the server decides when an engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Frames get a descriptor of their own, so that whatever prints to stdout cannot corrupt them.
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Unbuffered: a thread that waits in a buffered reader holds its lock, which aborts the interpreter's shutdown.
    incoming = FileIO(os.dup(sys.stdin.fileno()))
    asyncio.run(Worker(create, incoming, outgoing).run())


def create_container(directory: Path, settings: LoadSettings) -> Container:
    if settings.memory.cuda_malloc_async:
        # Read by torch when it is imported; what the user has set stays.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    # Imported here: the import takes seconds and logs, and a process that only reuses `run` shall not need the engine.
    from backends.exllamav3.model import ExllamaV3Container

    return ExllamaV3Container.create(directory, settings)


if __name__ == "__main__":
    run(create_container)
