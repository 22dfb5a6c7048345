"""One engine process: its pipes, what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from loguru import logger

from backends import messages
from backends.printed import PrintedLines
from common.errors import EngineFailed, EngineHangs, ModelLoadFailed
from common.hidden_paths import hide_paths

PROJECT_ROOT = Path(__file__).resolve().parent.parent
READ_BYTES = 1 << 16
# The exit code of a process that was killed (SIGKILL): by hand, or by a system that runs out of memory.
KILLED = -9
# How long a process may go on that has closed its pipe.
LINGER_SECONDS = 10.0
# How long its last words are waited for after its end: what it has started may keep its pipes open for ever.
LAST_WORDS_SECONDS = 1.0
# How long a process that was killed is waited for: one that hangs in a driver does not end.
KILL_SECONDS = 30.0
# Waits into which the time is cut for which a process may say nothing.
WATCHDOG_WAITS = 20

Said = TypeVar("Said")  # the union of what a process says


class _Protocol(SubprocessStreamProtocol):
    """Tells when the process has exited; `Process.wait()` also waits for what keeps its pipes open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=READ_BYTES, loop=loop)
        self.exited = asyncio.Event()  # or given up

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class EngineProcess(Generic[Said]):
    """A process from its start to its end; `ended` is done when nothing more can come from it.

    Attributes:
        ended: reads what the process says until it ends.
        heard_at: when the last message came, in seconds of the loop's clock.
    """

    def __init__(
        self,
        name: str,
        transport: asyncio.SubprocessTransport,
        protocol: _Protocol,
        decoder: msgspec.msgpack.Decoder[Said],
        receive: Callable[[Said], None],
        takes_less_memory: str,
    ) -> None:
        """For `start()`."""
        self.heard_at = 0.0
        self._name = name
        self._transport = transport
        self._exited = protocol.exited
        self._process = Process(transport, protocol, asyncio.get_running_loop())
        self._decoder = decoder
        self._receive = receive
        self._takes_less_memory = takes_less_memory
        self._printed = PrintedLines(name)
        self._fault: EngineFailed | None = None
        # It outlives the request that has the model loaded, so it must not carry that request's id into the log.
        self.ended = asyncio.create_task(self._follow(), context=contextvars.Context())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        decoder: msgspec.msgpack.Decoder[Said],
        receive: Callable[[Said], None],
        takes_less_memory: str,
    ) -> EngineProcess[Said]:
        """Start a process.

        Args:
            name: of its model, for messages.
            command: its command line.
            decoder: of the messages that it sends.
            receive: called with each message that comes. What it raises ends the process.
            takes_less_memory: what a user can do about it, for `failure()`.

        Raises:
            ModelLoadFailed: the system does not start it.
        """
        loop = asyncio.get_running_loop()
        # As asyncio.create_subprocess_exec does, which keeps the transport to itself: only that can close the pipes
        # while another process, started by this one, holds their other ends.
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _Protocol(loop),
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd=PROJECT_ROOT,
            )
        except OSError as error:
            raise ModelLoadFailed(
                f"The engine process of {name} cannot be started: {error.strerror}. The system may lack memory, "
                "processes or open files."
            ) from error
        return cls(name, transport, protocol, decoder, receive, takes_less_memory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    def write(self, message: msgspec.Struct) -> None:
        """Queue a message. Raises `RequestTooLarge` for one that no frame holds."""
        assert self._process.stdin is not None
        self._process.stdin.write(messages.frame(message))

    async def drain(self) -> None:
        """Wait until the pipe takes more."""
        assert self._process.stdin is not None
        # A process that has just died is noticed by `ended`.
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    def close_input(self) -> None:
        """Tell the process that nothing more comes, which ends it as soon as it reads that."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self, fault: EngineFailed | None = None) -> None:
        """End the process at once.

        Args:
            fault: why, for `failure()`; the first one counts.
        """
        self._fault = self._fault or fault
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._exited.set)

    def failure(self) -> EngineFailed:
        """Why the process has ended, which nobody had asked it to."""
        if self._fault is not None:
            return self._fault
        code = self.returncode
        if code == KILLED:
            return EngineFailed(
                f"The engine process of {self._name} was killed from outside (code {code}), as systems do when memory "
                f"runs out; the system's log says more. {self._takes_less_memory}"
            )
        said = f" Its last words: {hide_paths(self._printed.last)}" if self._printed.last else ""
        return EngineFailed(f"The engine process of {self._name} ended with code {code}.{said}")

    async def end_when_hanging(self, has_work: Callable[[], bool], limit: float) -> None:
        """Kill the process once it has had work and said nothing for a time; returns then, or never.

        The time is counted in short waits: what passes while this process itself stands still, as on a machine that
        sleeps, is not held against the engine.

        Args:
            has_work: whether it owes an answer.
            limit: seconds.
        """
        quiet = 0
        while quiet <= WATCHDOG_WAITS:
            heard_at = self.heard_at
            await asyncio.sleep(limit / WATCHDOG_WAITS)
            quiet = quiet + 1 if has_work() and heard_at == self.heard_at else 0
        fault = EngineHangs(
            f"The engine of {self._name} reported no progress for {limit:g} s (network.engine_timeout) and was ended."
        )
        logger.error("{}", fault.message)
        self.kill(fault)

    async def _follow(self) -> None:
        reading = {asyncio.create_task(self._read_messages()), asyncio.create_task(self._read_printed())}
        # Not for the end of its pipes.
        await self._exited.wait()
        if self.returncode is None:
            logger.critical("The engine process of {} was killed and does not end; it is given up", self._name)
        await asyncio.wait(reading, timeout=LAST_WORDS_SECONDS)
        for task in reading:
            task.cancel()
        assert self._process.stdin is not None
        if (stdin := self._process.stdin.transport).get_write_buffer_size():
            stdin.abort()  # which is not closed else before all is written
        self._transport.close()

    async def _read_messages(self) -> None:
        """Hand on what the process says. One that cannot be understood, or says that nothing more comes, is ended."""
        try:
            await self._hand_on_messages()
        except Exception:
            logger.exception("The engine process of {} sent what cannot be read; it is ended", self._name)
            self.kill(EngineFailed(f"The engine process of {self._name} sent what cannot be read, and was ended."))
            return
        try:
            await asyncio.wait_for(self._exited.wait(), LINGER_SECONDS)
        except TimeoutError:
            self.kill(EngineFailed(f"The engine process of {self._name} closed its pipe, and was ended."))

    async def _hand_on_messages(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        loop = asyncio.get_running_loop()
        read = bytearray()
        while part := await stdout.read(READ_BYTES):
            self.heard_at = loop.time()
            read += part
            for body in messages.take_frames(read):
                self._receive(self._decoder.decode(body))

    async def _read_printed(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while part := await stderr.read(READ_BYTES):
            self._printed.feed(part)
        self._printed.end()
