"""Which models are up: load, swap, roll back, unload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from loguru import logger

from backends.client import WORKER_COMMAND, EngineClient
from backends.messages import LoadProgress
from common.caching import PlanBasis
from common.config_models import LoadSettings
from common.errors import ModelLoadFailed, ModelNotLoaded, ServerError
from common.model_folder import model_folder

ManagerState: TypeAlias = Literal["empty", "loading", "ready", "failed"]
ReportProgress: TypeAlias = Callable[[LoadProgress], None]


class ModelManager:
    """Holds the engine process that answers, and exchanges it.

    A load goes: check in a new process while the old model still serves; stop taking requests; let those in flight
    finish (or cancel them); end the old process; load. When the last step fails, the old model is loaded again.

    Attributes:
        model_dir: parent of the model folders.
        load_error: why the last load failed; None after one that did not, and before the first.
        on_loaded: called with each model that has just been loaded. It must not raise, nor must the next two.
        on_load_ended: called at the end of each load, with whether the model serves.
        on_restart: called after each start of an engine in place of one that has died, with whether the model is back.
    """

    def __init__(self, model_dir: Path, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
        self.model_dir = model_dir
        self.load_error: str | None = None
        self.on_loaded: Callable[[EngineClient], None] = lambda client: None
        self.on_load_ended: Callable[[bool], None] = lambda loaded: None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._worker_command = worker_command
        self._client: EngineClient | None = None
        self._loading: str | None = None  # name of the model being loaded
        self._replacing = False  # the loaded model takes no more requests
        self._lock = asyncio.Lock()  # one change at a time
        self._loads: set[asyncio.Task[None]] = set()

    # --- what is there ------------------------------------------------------------------------------------------

    @property
    def current(self) -> EngineClient | None:
        """The model that answers, or None. During a swap the old one counts until it stops taking requests."""
        return None if self._replacing else self._client

    @property
    def state(self) -> ManagerState:
        if self.current is not None:
            return "ready" if self.current.state != "failed" else "failed"
        if self._loading is not None:
            return "loading"
        return "failed" if self.load_error else "empty"

    def require(self) -> EngineClient:
        """`current`, or ModelNotLoaded with the reason."""
        if self.current is not None:
            return self.current
        if self._loading is not None:
            raise ModelNotLoaded(f"The model {self._loading} is being loaded. Try again in a moment.")
        if self.load_error is not None:
            raise ModelNotLoaded(f"No model is loaded; the last load failed: {self.load_error}")
        raise ModelNotLoaded("No model is loaded. Load one with POST /v1/model/load or set model.model_name.")

    def list_models(self) -> list[str]:
        """Names of the folders in `model_dir` that hold a config.json, sorted without regard to case."""
        if not self.model_dir.is_dir():
            return []
        names = (entry.name for entry in self.model_dir.iterdir() if (entry / "config.json").is_file())
        return sorted(names, key=lambda name: (name.casefold(), name))

    def resolve(self, name: str, param: str = "model_name") -> Path:
        """Folder of the model `name`; see `model_folder` for what it raises."""
        return model_folder(self.model_dir, name, param)

    async def plan_basis(self, directory: Path, settings: LoadSettings) -> PlanBasis | None:
        """What checkpoints of a model would cost if it were loaded; None without recurrent layers.

        Asks a process that ends without having read a weight. `current` is not touched.

        Raises:
            ServerError: what is wrong with the model or the settings.
        """
        client = EngineClient(directory, settings, self._worker_command)
        try:
            await client.prepare()
            return client.plan
        finally:
            await client.close()

    # --- changes ------------------------------------------------------------------------------------------------

    async def load(
        self, directory: Path, settings: LoadSettings, *, skip_queue: bool = False
    ) -> AsyncIterator[LoadProgress]:
        """Load a model in place of the one that is loaded, yielding progress.

        The load goes on to its end when the caller stops iterating. What is loaded already, with equal settings, is
        answered at once with one progress record.

        Args:
            directory: folder of the model.
            settings: everything that it is loaded with.
            skip_queue: cancel the requests in flight instead of waiting for them.

        Raises:
            ServerError: what is wrong with the model or the settings; the loaded model was not touched.
            ModelLoadFailed: loading failed; the message says whether the previous model serves again.
        """
        progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
        task = asyncio.create_task(self._load(directory, settings, skip_queue, progress.put_nowait))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        task.add_done_callback(lambda done: progress.put_nowait(None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # logged where it is raised
        while (record := await progress.get()) is not None:
            yield record
        await task

    async def unload(self) -> None:
        """End the loaded model; its requests in flight get `RequestCancelled`."""
        async with self._lock:
            await self._close_current()
            self.load_error = None

    async def close(self) -> None:
        """End everything, loads in progress included."""
        for task in list(self._loads):
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        async with self._lock:
            await self._close_current()

    async def _load(self, directory: Path, settings: LoadSettings, skip_queue: bool, report: ReportProgress) -> None:
        async with self._lock:
            old = self._client
            if old is not None and old.state == "ready" and (old.directory, old.settings) == (directory, settings):
                report(LoadProgress(component="model", module=1, modules=1))
                return
            logger.info("Loading {}", directory.name)
            self._loading = directory.name
            new = self._new_client(directory, settings)
            try:
                await new.prepare()
                if old is not None:
                    self._replacing = True
                    if not skip_queue:
                        await old.drained()
                    await self._close_current()
                await self._bring_up(new, report)
                self.load_error = None
                self.on_load_ended(True)
            except ServerError as error:
                logger.error("Loading {} failed: {}", directory.name, error.message)
                self.load_error = error.message
                self.on_load_ended(False)
                if old is None or self._client is old:
                    raise
                raise ModelLoadFailed(f"{error.message.rstrip('.')}. {await self._roll_back(old)}") from error
            except BaseException:
                await new.close()
                raise
            finally:
                self._loading = None
                self._replacing = False

    def _new_client(self, directory: Path, settings: LoadSettings) -> EngineClient:
        client = EngineClient(directory, settings, self._worker_command)
        client.on_restart = self._restarted
        return client

    def _restarted(self, back: bool) -> None:
        self.on_restart(back)

    async def _bring_up(self, client: EngineClient, report: ReportProgress) -> None:
        async for record in client.load():
            report(record)
        self._client = client
        self.on_loaded(client)

    async def _roll_back(self, old: EngineClient) -> str:
        again = self._new_client(old.directory, old.settings)
        try:
            await again.prepare()
            await self._bring_up(again, lambda record: None)
        except ServerError as error:
            logger.error("The previous model {} could not be loaded again: {}", old.name, error.message)
            return f"The previous model {old.name} could not be loaded again: {error.message}"
        logger.info("The previous model {} is loaded again", old.name)
        return f"The previous model {old.name} is loaded again."

    async def _close_current(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
