"""Which embedding models and rerankers are up, by name."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from loguru import logger

from backends.embeddings.client import WORKER_COMMAND, Begin, EmbeddingClient, do_nothing
from backends.embeddings.messages import Device, EmbedOptions, Input, Kind
from backends.process_client import told_of_load
from common.config_models import EmbeddingsConfig
from common.errors import InvalidRequest, ModelNotFound, ModelNotLoaded, RequestCancelled, ServerError
from common.model_folder import embedding_folder, list_embedding_folders


class Embeddings(msgspec.Struct, frozen=True):
    """Vectors of texts."""

    model: str
    vectors: list[bytes]  # in the order of the texts; float32, little-endian
    tokens: int  # of all texts, what the model adds included

    def floats(self) -> list[list[float]]:
        return [floats_of(vector) for vector in self.vectors]


class Ranking(msgspec.Struct, frozen=True):
    """How well documents fit a query."""

    model: str
    scores: list[float]  # in the order of the documents; more is better
    tokens: int


class EmbeddingManager:
    """Holds embedding models and rerankers, each in a process of its own.

    `embed()` and `rank()` are what front ends call. A request names a model that is loaded, or none, which takes the
    one that was loaded first and is of the kind. A name of a model that is not loaded is a `ModelNotFound`, except that
    with `load_on_demand` the model is loaded for the request, which waits for it, and one that has failed again.

    Args:
        settings: of the section "embeddings".
        load_on_demand: `model.inline_model_loading`.
        worker_command: command line of the processes.
        engine_timeout: see `ProcessClient`.

    Attributes:
        model_dir: parent of the models' folders.
        on_restart: called after each start of a process in place of one that has died, with whether the model is back.
            It must not raise.
    """

    def __init__(
        self,
        settings: EmbeddingsConfig,
        *,
        load_on_demand: bool = False,
        worker_command: Sequence[str] = WORKER_COMMAND,
        engine_timeout: float = 0,
    ) -> None:
        self.model_dir = Path(settings.embedding_model_dir)
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._settings = settings
        self._load_on_demand = load_on_demand
        self._worker_command = worker_command
        self._engine_timeout = engine_timeout
        self._loaded: dict[str, EmbeddingClient] = {}  # in the order in which they were loaded
        self._clients: set[EmbeddingClient] = set()  # all whose processes may live
        self._loads: set[asyncio.Task[EmbeddingClient]] = set()
        self._lock = asyncio.Lock()  # one change at a time
        self._closed = False

    # --- what is there ------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> Mapping[str, EmbeddingClient]:
        """The models that answer, by the names that requests give, in the order in which they were loaded."""
        return self._loaded

    def list_models(self) -> list[str]:
        """Names of the folders in `model_dir` that may hold an embedding model. A language model's looks the same."""
        return list_embedding_folders(self.model_dir)

    def require(self) -> tuple[str, EmbeddingClient]:
        """The model that was loaded first, and its name. Raises `ModelNotLoaded` where there is none."""
        for name, client in self._loaded.items():
            return name, client
        raise ModelNotLoaded(
            "No embedding model is loaded. Load one with POST /v1/model/embedding/load or set "
            "embeddings.embedding_model_name."
        )

    # --- requests -----------------------------------------------------------------------------------------------

    async def embed(
        self,
        model: str | None,
        inputs: Sequence[Input],
        options: EmbedOptions | None = None,
        *,
        param: str = "input",
        begin: Begin = do_nothing,
    ) -> Embeddings:
        """Vectors of texts, by an embedding model. Cancelling the call ends the work on it.

        Args:
            model: its name; None or "": see above.
            inputs: at least one; each a text, or token ids of the model that are used as they are.
            options: dimensions, truncation and the like; None for the defaults.
            param: path of the request's field with the inputs, for errors.
            begin: called once when a first part is done, if that is not all: the request waits no longer.

        Raises:
            ModelNotFound: no such model, or it is not loaded and may not be loaded on demand.
            ModelNotLoaded: none is loaded, or the one that was asked has failed.
            InvalidRequest: an input is too long, a token id unknown, an option not for this model, or the model is a
                reranker.
            EngineFailed: the process died meanwhile; it is started again.
        """
        name, client = await self._serving(model, ("embedding",))
        options = options or EmbedOptions()
        if options.truncate is None:
            options = msgspec.structs.replace(options, truncate=self._settings.embeddings_truncate)
        answer = await client.embed(inputs, options, param=param, begin=begin)
        return Embeddings(name, answer.vectors, answer.tokens)

    async def rank(
        self,
        model: str | None,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool | None = None,
        raw: bool = False,
        begin: Begin = do_nothing,
    ) -> Ranking:
        """How well documents fit a query, by a reranker, or else by the embeddings that a model makes of them.

        Args:
            model: as for `embed()`; without a name a reranker comes before an embedding model.
            query: a text.
            documents: at least one.
            truncate: as in `EmbedOptions`.
            raw: scores of a reranker as they are, instead of between 0 and 1.
            begin: as for `embed()`.

        Raises:
            ServerError: as for `embed()`.
        """
        name, client = await self._serving(model, ("reranker", "embedding"))
        truncate = self._settings.embeddings_truncate if truncate is None else truncate
        answer = await client.rank(query, documents, truncate=truncate, raw=raw, begin=begin)
        return Ranking(name, answer.scores, answer.tokens)

    async def _serving(self, model: str | None, kinds: Sequence[Kind]) -> tuple[str, EmbeddingClient]:
        """The model for a request, and its name. Of several kinds the first that is there."""
        if not model:
            for kind in kinds:
                for name, client in self._loaded.items():
                    if client.info.kind == kind:
                        return name, client
            self.require()
            raise ModelNotLoaded(
                "Only rerankers are loaded. Load an embedding model with POST /v1/model/embedding/load."
            )
        loaded = self._loaded.get(model)
        comes_back = loaded is not None and loaded.state == "failed" and self._load_on_demand
        client = await self._on_demand(model) if loaded is None or comes_back else loaded
        if client.info.kind not in kinds:
            raise InvalidRequest(
                f"The model {model} is a reranker, which makes no embeddings. Name an embedding model, or use "
                "/v1/rerank.",
                param="model",
            )
        return model, client

    async def _on_demand(self, name: str) -> EmbeddingClient:
        if self._load_on_demand:
            return await self.load(name, param="model")
        others = ", ".join(self._loaded) or "none"
        raise ModelNotFound(
            f"There is no embedding model {name!r} loaded; those that are: {others}. Leave model out for the first of "
            "them, load it with POST /v1/model/embedding/load, or set model.inline_model_loading.",
            param="model",
        )

    # --- changes ------------------------------------------------------------------------------------------------

    async def load(
        self, name: str, device: Device | None = None, *, param: str = "embedding_model_name"
    ) -> EmbeddingClient:
        """Load a model beside those that are loaded. It goes on to its end when the caller is cancelled.

        One that is loaded already is left as it is; on another device it is loaded there and then replaced.

        Args:
            name: of its folder in `model_dir`.
            device: None: as `embeddings.embeddings_device` says.
            param: path of the request's field with the name, for errors.

        Raises:
            InvalidRequest: the name leads out of `model_dir`.
            ModelNotFound: there is no such folder.
            Unsupported: sentence-transformers is not installed, or it is no model of the kinds that are served.
            ModelLoadFailed: loading failed. What was loaded still is.
            RequestCancelled: the server is shutting down.
        """
        directory = embedding_folder(self.model_dir, name, param)
        task = asyncio.create_task(self._load(name, directory, device or self._settings.embeddings_device))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # logged where it is raised
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestCancelled(f"Loading {name} was given up: the server is shutting down.") from None
            raise

    async def unload(self, name: str | None = None) -> None:
        """End a model, or all; requests in flight get `RequestCancelled`.

        Raises:
            ModelNotLoaded: it is not loaded, or none is.
        """
        async with self._lock:
            self.require()
            if name is not None and name not in self._loaded:
                raise ModelNotLoaded(f"The embedding model {name!r} is not loaded.")
            for each in [name] if name is not None else list(self._loaded):
                await self._end(self._loaded.pop(each))

    async def load_at_start(self) -> None:
        """Load `embeddings.embedding_model_name`, if it is set. A failure is logged; the server goes on without it."""
        if name := self._settings.embedding_model_name:
            try:
                await self.load(name)
            except ServerError as error:
                logger.error("The embedding model {} was not loaded: {}", name, error.message)

    async def stop_loading(self) -> None:
        """Give up loads in progress, and take no more. What serves goes on."""
        self._closed = True
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)

    async def close(self, force: bool = False) -> None:
        """End everything; nothing is loaded any more. Safe to call more than once.

        Args:
            force: kill the processes, also where another call is waiting for them to end in order.
        """
        self._closed = True
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*(client.close(force) for client in self._clients), return_exceptions=True)
        await asyncio.gather(*self._loads, return_exceptions=True)
        self._loaded.clear()

    async def _load(self, name: str, directory: Path, device: Device) -> EmbeddingClient:
        async with self._lock:
            old = self._loaded.get(name)
            if old is not None and old.device == device and old.state != "failed":
                return old
            client = self._new_client(directory, device)
            logger.info("Loading the embedding model {}", name)
            try:
                await client.load()
            except BaseException as error:
                await self._end(client)
                if isinstance(error, Exception):
                    raise told_of_load(name, error) from error
                raise
            self._loaded[name] = client
            if old is not None:
                await self._end(old)
            logger.info("The embedding model {} is ready", name)
            return client

    def _new_client(self, directory: Path, device: Device) -> EmbeddingClient:
        if self._closed:
            raise RequestCancelled("The server is shutting down; it loads no model any more.")
        client = EmbeddingClient(
            directory,
            device,
            self._worker_command,
            batch_tokens=self._settings.embeddings_batch_tokens,
            engine_timeout=self._engine_timeout,
        )
        client.on_restart = lambda back: self.on_restart(back)
        self._clients.add(client)
        return client

    async def _end(self, client: EmbeddingClient) -> None:
        await client.close()
        self._clients.discard(client)


def floats_of(vector: bytes) -> list[float]:
    """The numbers of a vector of `Embeddings`."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
