"""Server side of one engine process: prepare, load, generate, cancel, and ask for what else it can do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from loguru import logger

from backends import messages
from backends.messages import FromEngine, LoadProgress, Lora, ModelInfo
from backends.process_client import ProcessClient
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import LoadSettings, LoraInstance
from common.errors import ErrorRecord, ModelLoadFailed, RequestCancelled, ServerError
from common.generation import Event, Finish, GenerationRequest, ImageInput, TextSpan

WORKER_COMMAND = (sys.executable, "-m", "backends.worker")

# How long an engine that writes its cache to disk when it was told to exit, and says how it gets on, may say nothing
# before it is killed.
FLUSH_SECONDS = 60.0


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


class EngineClient(ProcessClient[FromEngine]):
    """One engine process and the model in it.

    Life: `prepare()` -> `load()` -> any number of `generate()`, `encode()`, `decode()` -> `close()`. `ProcessClient`
    says what happens when the process dies in between.

    Attributes:
        settings: what the model is, or will be, loaded with.
        info: the loaded model; set once `load()` has ended.
        plan: what checkpoints of the model cost; set by `prepare()`, and again by `load()`, which may measure for it.
            None: it has no recurrent layers.
        memory: bytes of device memory that the model takes; estimated by `prepare()`, measured by `load()` where that
            can be done.
        left_out: adapters of `settings` that the model is up without, each with why: they could not be applied again
            when its engine was started anew.
        on_idle: called when the last request in flight has ended. It must not raise.
    """

    decoder = messages.from_engine_decoder
    takes_less_memory = (
        "A model takes less with a smaller cache_size, memory less with smaller memory.sysmem_recurrent_cache and "
        "memory.sysmem_kv_cache."
    )

    def __init__(
        self,
        directory: Path,
        settings: LoadSettings,
        command: Sequence[str] = WORKER_COMMAND,
        *,
        engine_timeout: float = 0,
        was_up: bool = False,
    ) -> None:
        """
        Args:
            directory, command, engine_timeout: see `ProcessClient`.
            settings: what to load the model with.
            was_up: with these settings before, as it is from the first `load()` on. An adapter that cannot be applied
                any more does not keep the model from coming back, see `left_out`.
        """
        super().__init__(directory, command, engine_timeout)
        self.settings = settings
        self.info: ModelInfo | None = None
        self.plan: PlanBasis | None = None
        self.memory = 0
        self.left_out: dict[str, str] = {}
        self.on_idle: Callable[[], None] = lambda: None
        self._was_up = was_up
        self._generations: dict[str, Generation] = {}
        self._changing = asyncio.Lock()  # held while the model changes, so that new requests wait
        self._changes: set[asyncio.Task[None]] = set()

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
        settings = _with_loras(self.settings, []) if self._was_up else self.settings
        async with self._loading():
            await self._spawn()
            self._write(messages.Prepare(directory=str(self.directory), settings=settings.model_dump_json().encode()))
            answer = await self._load_event()
            if not isinstance(answer, messages.Prepared):
                raise ModelLoadFailed(f"The engine answered {type(answer).__name__} when asked to prepare {self.name}.")
        self.plan = answer.plan
        self.memory = answer.memory
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
            self.memory = event.memory
            if self._was_up and self.settings.lora.loras:
                await self._apply_again()
        self._was_up = True
        self._is_ready()

    # --- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Hand a request to the engine. Returns at once; see `Generation.accepted()`.

        Raises:
            ModelNotLoaded: the model is gone or could not be brought back.
        """
        async with self._changing:
            await self._available()
        request_id = str(next(self._ids))
        generation = Generation(self, request_id)
        self._write(messages.Generate(id=request_id, request=request))
        self._generations[request_id] = generation
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
        images: Sequence[ImageInput] = (),
    ) -> list[int]:
        """Token ids of a text; the arguments mean what the fields of `GenerationRequest` do.

        Images bring ids of their own, which no vocabulary has.
        """
        answer = await self._call(
            lambda call_id: messages.Encode(
                id=call_id,
                text=text,
                add_bos=add_bos,
                encode_special_tokens=encode_special_tokens,
                literals=list(literals),
                images=list(images),
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

    # --- adapters -----------------------------------------------------------------------------------------------

    async def check_loras(self, loras: Sequence[Lora]) -> list[ErrorRecord | None]:
        """For each adapter why it cannot be applied to this model; None for one that can. Changes nothing."""
        answer = await self._call(
            lambda call_id: messages.CheckLoras(id=call_id, loras=list(loras)), messages.LorasChecked
        )
        return answer.problems

    async def add_loras(self, loras: Sequence[Lora], *, skip_queue: bool = False) -> None:
        """Apply adapters beside those that are; one that is applied already gets the new scaling.

        Waits for the requests in flight; those that come meanwhile wait. What is applied stays so when the process is
        started again. The change goes on to its end when the caller stops waiting.

        Args:
            skip_queue: cancel the requests in flight instead of waiting for them.

        Raises:
            ServerError: one cannot be applied, or the engine failed; what was applied before still is.
        """
        names = {lora.name for lora in loras}
        await self._change_loras(
            lambda active: [*(lora for lora in active if lora.name not in names), *loras], skip_queue
        )

    async def remove_loras(self) -> None:
        """Take all adapters off, once the requests in flight have ended."""
        await self._change_loras(lambda active: [], skip_queue=False)

    async def _change_loras(self, choose: Callable[[Sequence[Lora]], list[Lora]], skip_queue: bool) -> None:
        change = asyncio.create_task(self._set_loras(choose, skip_queue))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        change.add_done_callback(lambda done: done.cancelled() or done.exception())  # which the caller gets, if there
        await asyncio.shield(change)

    async def _set_loras(self, choose: Callable[[Sequence[Lora]], list[Lora]], skip_queue: bool) -> None:
        async with self._changing:
            await self._available()
            assert self.info is not None
            loras = choose(self.info.loras)
            if loras == self.info.loras and not self.left_out:
                return
            if skip_queue:
                for request_id in list(self._generations):
                    await self._cancel(request_id, "The model's adapters were exchanged during this request.")
            await self._apply(loras)
            self.settings = _with_loras(self.settings, loras)
            self.left_out = {}
            names = ", ".join(f"{lora.name} ({lora.scaling:g})" for lora in loras)
            logger.info("Adapters of {}: {}", self.name, names or "none")

    async def _apply(self, loras: Sequence[Lora]) -> None:
        answer = await self._ask_process(
            lambda call_id: messages.SetLoras(id=call_id, loras=list(loras)), messages.LorasSet
        )
        self.info = answer.info

    async def _apply_again(self) -> None:
        """Apply the adapters of the settings to a model that has just been loaded without any."""
        self.left_out = {}
        wanted = [Lora(lora.name, lora.scaling) for lora in self.settings.lora.loras]
        try:
            await self._apply(wanted)
        except ServerError:
            if self._process is None:  # it has died of one of them, and nobody knows of which
                raise
            await self._apply_one_by_one(wanted)

    async def _apply_one_by_one(self, wanted: Sequence[Lora]) -> None:
        applied: list[Lora] = []
        for lora in wanted:
            try:
                await self._apply([*applied, lora])
            except ServerError as error:
                if self._process is None:
                    raise
                self.left_out[lora.name] = error.message
            else:
                applied.append(lora)
        warnings = [
            f"The model has come back without the adapter {name}, which cannot be applied any more: {reason}"
            for name, reason in self.left_out.items()
        ]
        for warning in warnings:
            logger.error("{}: {}", self.name, warning)
        assert self.info is not None
        self.info = msgspec.structs.replace(self.info, warnings=[*self.info.warnings, *warnings])

    async def _cancel(self, request_id: str, reason: str = "The request was cancelled.") -> None:
        generation = self._forget(request_id)
        if generation is None:
            return
        generation._fail(RequestCancelled(reason))
        self._given_up.add(request_id)
        # Without waiting: the engine may hang, and read nothing.
        self._write(messages.Cancel(id=request_id))

    def _forget(self, request_id: str) -> Generation | None:
        self._given_up.discard(request_id)
        generation = self._generations.pop(request_id, None)
        if generation is not None and not self._generations:
            self.on_idle()
        return generation

    # --- the process --------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._generations) or super()._has_work

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
                | messages.LorasChecked(id=call_id)
                | messages.LorasSet(id=call_id)
            ):
                self._answered(call_id, message)
            case messages.Log(level=level, message=text):
                logger.log(level, "[engine {}] {}", self.name, text)
            case messages.Prepared() | messages.LoadProgress() | messages.Loaded() | messages.LoadFailed():
                self._got_load_event(message)

    def _fail(self, message_id: str, error: ServerError) -> None:
        super()._fail(message_id, error)
        if (generation := self._forget(message_id)) is not None:
            generation._fail(error)

    def _fail_everything(self, error: ServerError) -> None:
        super()._fail_everything(error)
        for request_id in list(self._generations):
            self._fail(request_id, error)

    async def _bring_up(self) -> None:
        await self.prepare()
        async for _ in self.load():
            pass

    @property
    def _shutdown_seconds(self) -> float:
        return FLUSH_SECONDS if self.settings.memory.disk_cache_dir else super()._shutdown_seconds


def _with_loras(settings: LoadSettings, loras: Sequence[Lora]) -> LoadSettings:
    applied = [LoraInstance(name=lora.name, scaling=lora.scaling) for lora in loras]
    return settings.model_copy(update={"lora": settings.lora.model_copy(update={"loras": applied})})
