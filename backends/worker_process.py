"""Engine side of a process with a model in it, whatever the model does: its pipes, its log, and its end.

The event loop runs in the main thread, and the engine in that loop. Two other threads touch only bytes: the one that
reads stdin, and the interpreter's end when stdin closes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from io import FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Generic, TypeVar

import msgspec
from loguru import logger

from backends import messages
from common.errors import EngineFailed, EngineOutOfMemory, ErrorRecord, ModelLoadFailed, ServerError
from common.hidden_paths import hide_paths
from common.logger import ToLoguru

if TYPE_CHECKING:
    from loguru import Message

# What torch's allocators, CUDA and the engine's own loader say when memory runs out.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "insufficient vram")

Asked = TypeVar("Asked")  # the union of what the server says


class WorkerProcess(Generic[Asked]):
    """Carries messages between a pipe pair and a model until told to stop."""

    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # of what the server says

    def __init__(self, incoming: FileIO, outgoing: BinaryIO) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._inbox: asyncio.Queue[Asked] = asyncio.Queue()  # of a process that does not serve yet
        self._receive: Callable[[Asked], None] = self._inbox.put_nowait
        self._stopped = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by id of the message
        self._flushing: asyncio.Handle | None = None  # of what is written and not flushed

    def _open(self) -> None:
        """Begin to read, and send the log. Needs a running loop."""
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

    def _serve_with(self, handle: Callable[[Asked], None]) -> None:
        """From now on have messages handled in the turn of the loop in which they come."""
        self._receive = handle
        while not self._inbox.empty():
            self._receive(self._inbox.get_nowait())

    def _run(self, message_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Have something done for a message, which can be cancelled by the id until it ends."""
        task = asyncio.create_task(work)
        self._tasks[message_id] = task
        task.add_done_callback(lambda done: self._tasks.pop(message_id, None))

    def _tell_load_failed(self, error: ServerError) -> None:
        record = msgspec.structs.replace(error.to_record(), message=hide_paths(error.message))
        self._send(messages.LoadFailed(error=record))

    def _tell(self, loop: asyncio.AbstractEventLoop, entry: Message) -> None:
        """Send a line of the log, in the loop's thread: the engine has others, which log too."""
        message = messages.Log(level=entry.record["level"].name, message=str(entry).rstrip())
        if threading.current_thread() is threading.main_thread():
            self._send(message)
            return
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: msgspec.Struct) -> None:
        self._outgoing.write(messages.frame(message))
        self._flush()

    def _write(self, message: msgspec.Struct) -> None:
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
            message = self.decoder.decode(self._read_exactly(length))
            try:
                loop.call_soon_threadsafe(self._deliver, message)
            except RuntimeError:  # the loop is closed: the model cannot be loaded, and the process ends by itself
                return
            if isinstance(message, messages.Shutdown):
                return

    def _deliver(self, message: Asked) -> None:
        self._receive(message)

    def _read_exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._incoming.read(count - len(parts))
            if not part:
                os._exit(0)  # the parent is gone; nobody wants what the engine may be busy with
            parts += part
        return bytes(parts)


def open_pipes() -> tuple[FileIO, BinaryIO]:
    """The ends of the pipes from and to the server, in place of this process's stdin and stdout."""
    # Ctrl-C in a terminal reaches every process of the group; the server decides when an engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Frames get a descriptor of their own, so that whatever prints to stdout cannot corrupt them.
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Line by line: what is kept back is lost where the process is ended, or ends in a hurry.
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    # Unbuffered: a thread that waits in a buffered reader holds its lock, which aborts the interpreter's shutdown.
    return FileIO(os.dup(sys.stdin.fileno())), outgoing


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the host or of a GPU. By name and text: this module does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def load_failure(name: str, error: Exception, *, too_large: str, strange: str) -> ModelLoadFailed:
    """What the server is told of a load over which a library has failed, which is logged here.

    Whatever it raises over a model is the user's to know: which file, which memory, which shape.

    Args:
        too_large: what helps where memory ran out.
        strange: what it may be otherwise.
    """
    logger.opt(exception=error).error("Loading {} failed", name)
    reason = too_large if is_out_of_memory(error) else f"{summary(error).removesuffix('.')}. {strange}"
    return ModelLoadFailed(f"{name}: {reason}")


def request_failure(error: Exception, *, too_large: str) -> ErrorRecord:
    """What the server is told of a request that has failed.

    Args:
        too_large: what helps where memory ran out.
    """
    if isinstance(error, ServerError):
        return error.to_record()
    logger.opt(exception=error).error("A request failed in the engine")
    if is_out_of_memory(error):
        return EngineOutOfMemory(too_large).to_record()
    return EngineFailed(f"The engine failed on this request: {summary(error)}").to_record()


def summary(error: Exception) -> str:
    """What went wrong, without the C++ stack that torch adds, and without the places of files."""
    return hide_paths(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
