"""Server side of one process with an embedding model or a reranker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from loguru import logger

from backends.embeddings import messages
from backends.embeddings.messages import Device, EmbeddingModelInfo, EmbedOptions, FromEmbedder, Input, LoadModel
from backends.messages import Cancel, Cancelled, Failed, LoadFailed, Log
from backends.process_client import ProcessClient
from common.errors import ModelLoadFailed, RequestCancelled, ServerError

WORKER_COMMAND = (sys.executable, "-m", "backends.embeddings.worker")

Answer = TypeVar("Answer", messages.Embedded, messages.Ranked)
Begin = Callable[[], None]


def do_nothing() -> None:
    pass


class EmbeddingClient(ProcessClient[FromEmbedder]):
    """One process and the embedding model or reranker in it.

    Life: `load()` -> any number of `embed()` or `rank()` -> `close()`; `ProcessClient` says what happens when the
    process dies in between.

    Attributes:
        device: where it computes, as it was asked for.
    """

    decoder = messages.from_embedder_decoder
    takes_less_memory = (
        "It takes less with a smaller embeddings.embeddings_batch_tokens; or load a smaller model for this task."
    )

    def __init__(
        self,
        directory: Path,
        device: Device,
        command: Sequence[str] = WORKER_COMMAND,
        *,
        batch_tokens: int | None = None,
        engine_timeout: float = 0,
    ) -> None:
        """`directory`, `command`, `engine_timeout`: see `ProcessClient`; the others: see `EmbeddingsConfig`."""
        super().__init__(directory, command, engine_timeout)
        self.device = device
        self._batch_tokens = batch_tokens
        self._info: EmbeddingModelInfo | None = None
        self._begin: dict[str, Begin] = {}  # by id of the call

    @property
    def info(self) -> EmbeddingModelInfo:
        """Of a model that has been loaded."""
        assert self._info is not None
        return self._info

    async def load(self) -> None:
        """Start the process and load the model.

        Raises:
            ServerError: why it cannot be; there is no process then.
        """
        async with self._loading():
            await self._spawn()
            self._write(LoadModel(directory=str(self.directory), device=self.device, batch_tokens=self._batch_tokens))
            answer = await self._load_event()
            if not isinstance(answer, messages.ModelLoaded):
                raise ModelLoadFailed(f"The engine answered {type(answer).__name__} when asked to load {self.name}.")
        self._info = answer.info
        self._is_ready()

    async def embed(
        self, inputs: Sequence[Input], options: EmbedOptions, *, param: str = "input", begin: Begin = do_nothing
    ) -> messages.Embedded:
        """Vectors of texts. What it has of them is dropped when the caller is cancelled.

        Args:
            inputs: at least one.
            options: `truncate` says yes or no.
            param: path of the request's field with the inputs, for errors.
            begin: called when the process has done the first part of it, if not before the end.

        Raises:
            InvalidRequest: an input or an option does not suit the model.
            ServerError: the model is gone, or has failed.
        """
        return await self._ask(
            lambda call_id: messages.Embed(id=call_id, inputs=list(inputs), options=options, param=param),
            messages.Embedded,
            begin,
        )

    async def rank(
        self, query: str, documents: Sequence[str], *, truncate: bool, raw: bool = False, begin: Begin = do_nothing
    ) -> messages.Ranked:
        """How well documents fit a query: what a reranker says, or the cosine of the angle between their embeddings.

        Args:
            query: a text.
            documents: at least one.
            truncate: of texts that are too long take what fits.
            raw: scores of a reranker as they are, instead of between 0 and 1.
            begin: as for `embed()`.

        Raises:
            ServerError: as for `embed()`.
        """
        return await self._ask(
            lambda call_id: messages.Rank(
                id=call_id, query=query, documents=list(documents), truncate=truncate, raw=raw
            ),
            messages.Ranked,
            begin,
        )

    async def _ask(self, build: Callable[[str], msgspec.Struct], expected: type[Answer], begin: Begin) -> Answer:
        asked: list[str] = []

        def build_and_note(call_id: str) -> msgspec.Struct:
            asked.append(call_id)
            self._begin[call_id] = begin
            return build(call_id)

        try:
            return await self._call(build_and_note, expected)
        finally:
            for call_id in asked:
                self._begin.pop(call_id, None)

    def _give_up(self, call_id: str) -> None:
        super()._give_up(call_id)
        # Without waiting: the process may hang, and read nothing.
        self._write(Cancel(id=call_id))

    async def _bring_up(self) -> None:
        await self.load()

    def _dispatch(self, message: FromEmbedder) -> None:
        match message:
            case messages.Embedded(id=call_id) | messages.Ranked(id=call_id):
                self._answered(call_id, message)
            case messages.Computing(id=call_id):
                if (begin := self._begin.pop(call_id, None)) is not None:
                    begin()
            case Failed(id=call_id, error=record):
                self._fail(call_id, ServerError.from_record(record))
            case Cancelled(id=call_id):
                self._fail(call_id, RequestCancelled("The engine ended the request before it was done."))
            case Log(level=level, message=text):
                logger.log(level, "[engine {}] {}", self.name, text)
            case messages.ModelLoaded() | LoadFailed():
                self._got_load_event(message)
