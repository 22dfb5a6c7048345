"""Engine side of one engine process: `python -m backends.worker`.

Reads messages from stdin, drives a container, writes messages to stdout. The event loop runs in the main thread, and
the engine in that loop: one thread alone calls torch, with a second one decoding gets two to three times slower. Two
other threads touch only bytes: the one that reads stdin, and the interpreter's end when stdin closes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from loguru import logger

from backends import messages
from backends.messages import FromEngine, LoadProgress, ModelInfo, ToEngine
from backends.worker_process import WorkerProcess, is_out_of_memory, load_failure, open_pipes, request_failure
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import LoadSettings
from common.errors import EngineOutOfMemory, ErrorRecord, ServerError
from common.generation import Event, Finish, GenerationRequest, ImageInput, TextSpan

MODEL_TOO_LARGE = (
    "there is not enough memory to load it. Lower cache_size or max_seq_len, take a smaller cache_mode such as Q8 or "
    "Q4, lower chunk_size or max_batch_size, spread the model with gpu_split or leave more room with "
    "autosplit_reserve, or take a smaller model."
)
MODEL_IS_STRANGE = "Its files may be damaged, or of a kind that the engine does not know; the server's log says more."
ADAPTERS_TOO_LARGE = (
    "There is not enough memory for these adapters; those that were applied still are. Apply fewer, or load the model "
    "with a smaller cache_size."
)
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

    def memory_bytes(self) -> int:
        """What it takes of its device's memory: an estimate; once it is loaded what was measured, where it can be."""

    def load(self) -> Iterator[LoadProgress]:
        """Read the weights."""

    async def create_generator(self) -> None:
        """Make the loaded model ready for `start()`. Needs a running loop."""

    def info(self) -> ModelInfo: ...

    async def see(self, images: Sequence[ImageInput]) -> None:
        """Turn images into what the model reads, while requests go on. Those that it has seen lately are quick.

        Raises `ServerError` for one that it cannot see.
        """

    def start(self, request: GenerationRequest) -> Job:
        """Tokenise, check and queue. Raises `ServerError` for a request that cannot be served."""

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None,
        encode_special_tokens: bool,
        literals: Sequence[TextSpan],
        images: Sequence[ImageInput],
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

    def check_loras(self, loras: Sequence[messages.Lora]) -> list[ErrorRecord | None]:
        """Which adapters could be applied, and why others cannot."""

    def set_loras(self, loras: Sequence[messages.Lora]) -> None:
        """Compute with these adapters and no others. No job may be running.

        Raises `ServerError` where one cannot be applied; nothing has changed then.
        """

    async def unload(self) -> None: ...


class CreateContainer(Protocol):
    def __call__(self, directory: Path, settings: LoadSettings) -> Container:
        """Check everything that can be checked without loading. Raises `ServerError`."""


# Answered in the turn of the loop in which they come.
Call: TypeAlias = (
    messages.Encode | messages.Decode | messages.Split | messages.Inspect | messages.Explain | messages.CheckLoras
)


class Worker(WorkerProcess[ToEngine]):
    """Has a container do what the server asks until told to stop."""

    decoder = messages.to_engine_decoder

    def __init__(self, create: CreateContainer, incoming: FileIO, outgoing: BinaryIO) -> None:
        super().__init__(incoming, outgoing)
        self._create = create

    async def run(self) -> None:
        self._open()
        try:
            container = await self._bring_up()
        except ServerError as error:
            self._tell_load_failed(error)
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
            self._send(messages.Prepared(plan=container.plan_basis(), memory=container.memory_bytes()))
            if not isinstance(await self._inbox.get(), messages.Load):
                return None
            for progress in container.load():
                self._send(progress)
            await container.create_generator()
        except ServerError:
            raise
        except Exception as error:
            raise load_failure(directory.name, error, too_large=MODEL_TOO_LARGE, strange=MODEL_IS_STRANGE) from error
        self._send(messages.Loaded(info=container.info(), plan=container.plan_basis(), memory=container.memory_bytes()))
        return container

    async def _serve(self, container: Container) -> None:
        """Take requests until told to stop.

        A message is handled in the turn of the loop in which it comes: between two turns lies a step of the engine,
        which may be a whole prefill chunk.
        """
        container.on_results = self._flush_last
        self._serve_with(partial(self._handle, container))
        await self._stopped.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await container.unload()

    def _handle(self, container: Container, message: ToEngine) -> None:
        match message:
            case messages.Generate(id=request_id, request=request) if request.images:
                self._run(request_id, self._see_and_start(container, request_id, request))
            case messages.Generate(id=request_id, request=request):
                self._start(container, request_id, request)
            case messages.Cancel(id=request_id):
                self._cancel(request_id)
            case (
                messages.Encode(images=[_, *_] as images)
                | messages.Explain(request=GenerationRequest(images=[_, *_] as images))
            ):
                self._run(message.id, self._see_and_answer(container, message, images))
            case (
                messages.Encode()
                | messages.Decode()
                | messages.Split()
                | messages.Inspect()
                | messages.Explain()
                | messages.CheckLoras()
            ):
                self._send(self._answer(container, message))
            case messages.FlushCache(id=call_id):
                self._run(call_id, self._change_cache(call_id, container.flush))
            case messages.ClearCache(id=call_id):
                self._run(call_id, self._change_cache(call_id, container.clear))
            case messages.SetLoras(id=call_id, loras=loras):
                self._run(call_id, self._set_loras(container, call_id, loras))
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

    async def _see_and_start(self, container: Container, request_id: str, request: GenerationRequest) -> None:
        """As `_start()`, of a request with images: steps of the engine come between them."""
        try:
            await container.see(request.images)
            job = container.start(request)
        except asyncio.CancelledError:
            self._send(messages.Cancelled(id=request_id))
            raise
        except Exception as error:
            self._send(messages.Failed(id=request_id, error=_record(error)))
            return
        self._send(messages.Accepted(id=request_id, prompt_tokens=job.prompt_tokens))
        await self._pump(container, request_id, job)

    async def _see_and_answer(self, container: Container, call: Call, images: Sequence[ImageInput]) -> None:
        try:
            await container.see(images)
        except Exception as error:
            self._send(messages.Failed(id=call.id, error=_record(error)))
        else:
            self._send(self._answer(container, call))

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

    async def _set_loras(self, container: Container, call_id: str, loras: Sequence[messages.Lora]) -> None:
        before = set(self._tasks.values()) - {asyncio.current_task()}
        if before:
            await asyncio.wait(before)
        try:
            container.set_loras(loras)
        except Exception as error:
            failure = EngineOutOfMemory(ADAPTERS_TOO_LARGE) if is_out_of_memory(error) else error
            self._send(messages.Failed(id=call_id, error=_record(failure)))
        else:
            self._send(messages.LorasSet(id=call_id, info=container.info()))

    def _answer(self, container: Container, call: Call) -> FromEngine:
        try:
            match call:
                case messages.Encode():
                    tokens = container.encode(
                        call.text,
                        add_bos=call.add_bos,
                        encode_special_tokens=call.encode_special_tokens,
                        literals=call.literals,
                        images=call.images,
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
                case messages.CheckLoras():
                    return messages.LorasChecked(id=call.id, problems=container.check_loras(call.loras))
        except Exception as error:
            return messages.Failed(id=call.id, error=_record(error))


def _record(error: Exception) -> ErrorRecord:
    return request_failure(error, too_large=REQUEST_TOO_LARGE)


async def _end(job: Job) -> None:
    try:
        await job.cancel()
    except Exception:
        logger.exception("A request could not be ended in order")


def run(create: CreateContainer) -> None:
    """Serve one server process over this process's stdin and stdout."""
    incoming, outgoing = open_pipes()
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
