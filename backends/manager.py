"""Which models are up: load, swap, roll back, unload."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from loguru import logger

from backends.client import WORKER_COMMAND, EngineClient
from backends.messages import LoadProgress
from common.caching import PlanBasis
from common.config_models import LoadSettings
from common.errors import ModelLoadFailed, ModelNotLoaded, RequestCancelled, ServerError
from common.model_folder import model_folder

ManagerState: TypeAlias = Literal["empty", "loading", "ready", "failed"]
ReportProgress: TypeAlias = Callable[[LoadProgress], None]


async def _nothing(client: EngineClient) -> None:
    pass


class ModelManager:
    """Holds the engine process that answers, and exchanges it.

    A load goes: check in a new process while the old model still serves; stop taking requests; let those in flight
    finish (or cancel them); end the old process; load. When the last step fails, the old model is loaded again.

    Attributes:
        model_dir: parent of the model folders.
        load_error: why the last load failed; None after one that did not, and before the first.
        on_loaded: awaited with each model that has just been loaded. It must not raise, nor must the next two.
        on_load_ended: called at the end of each load, with whether the model serves.
        on_restart: called after each start of an engine in place of one that has died, with whether the model is back.
    """

    def __init__(
        self, model_dir: Path, worker_command: Sequence[str] = WORKER_COMMAND, *, engine_timeout: float = 0
    ) -> None:
        """`worker_command` and `engine_timeout`: see `EngineClient`."""
        self.model_dir = model_dir
        self.load_error: str | None = None
        self.on_loaded: Callable[[EngineClient], Awaitable[None]] = _nothing
        self.on_load_ended: Callable[[bool], None] = lambda loaded: None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._worker_command = worker_command
        self._engine_timeout = engine_timeout
        self._client: EngineClient | None = None
        self._clients: set[EngineClient] = set()  # all whose processes may live
        self._closed = False
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
        try:
            entries = os.listdir(self.model_dir)
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.warning("model.model_dir {} cannot be read: {}", self.model_dir, error.strerror)
            return []
        # Unlike Path.is_file() not raising for a folder that is not ours to read.
        names = (name for name in entries if os.path.isfile(self.model_dir / name / "config.json"))
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
        client = self._new_client(directory, settings)
        try:
            await client.prepare()
            return client.plan
        finally:
            await self._end(client)

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
            RequestCancelled: the load was given up, as the server is shutting down.
        """
        progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
        task = asyncio.create_task(self._load(directory, settings, skip_queue, progress.put_nowait))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        task.add_done_callback(lambda done: progress.put_nowait(None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # logged where it is raised
        while (record := await progress.get()) is not None:
            yield record
        if task.cancelled():
            raise RequestCancelled(f"Loading {directory.name} was given up: the server is shutting down.")
        await task

    async def unload(self) -> None:
        """End the loaded model; its requests in flight get `RequestCancelled`."""
        async with self._lock:
            await self._close_current()
            self.load_error = None

    async def stop_loading(self) -> None:
        """Give up loads in progress, and take no more. What serves goes on."""
        self._closed = True
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)

    async def close(self, force: bool = False) -> None:
        """End everything, loads in progress included; nothing is loaded any more. Safe to call more than once.

        Args:
            force: kill the engine processes, also where another call is waiting for them to end in order.
        """
        self._closed = True
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*(client.close(force) for client in self._clients), return_exceptions=True)
        await asyncio.gather(*self._loads, return_exceptions=True)
        async with self._lock:
            await self._close_current()

    async def _load(self, directory: Path, settings: LoadSettings, skip_queue: bool, report: ReportProgress) -> None:
        async with self._lock:
            old = self._client
            if old is not None and old.state == "ready" and (old.directory, old.settings) == (directory, settings):
                report(LoadProgress(component="model", module=1, modules=1))
                return
            new = self._new_client(directory, settings)
            logger.info("Loading {}", directory.name)
            self._loading = directory.name
            try:
                await new.prepare()
                if old is not None:
                    self._replacing = True
                    if not skip_queue:
                        await old.drained()
                    await new.check_prepared()
                    await self._close_current()
                await self._bring_up(new, report)
            except Exception as error:
                await self._end(new)
                failure = _as_load_failure(directory.name, error)
                self.load_error = failure.message
                self.on_load_ended(False)
                if old is None or self._client is old:
                    raise failure from error
                raise ModelLoadFailed(f"{failure.message.rstrip('.')}. {await self._roll_back(old)}") from error
            except BaseException:
                await self._end(new)
                raise
            else:
                self.load_error = None
                self.on_load_ended(True)
            finally:
                self._loading = None
                self._replacing = False

    def _new_client(self, directory: Path, settings: LoadSettings) -> EngineClient:
        if self._closed:
            raise RequestCancelled("The server is shutting down; it loads no model any more.")
        client = EngineClient(directory, settings, self._worker_command, engine_timeout=self._engine_timeout)
        client.on_restart = self._restarted
        self._clients.add(client)
        return client

    def _restarted(self, back: bool) -> None:
        self.on_restart(back)

    async def _bring_up(self, client: EngineClient, report: ReportProgress) -> None:
        async for record in client.load():
            report(record)
        self._client = client
        await self.on_loaded(client)

    async def _roll_back(self, old: EngineClient) -> str:
        again = self._new_client(old.directory, old.settings)
        try:
            await again.prepare()
            await self._bring_up(again, lambda record: None)
        except Exception as error:
            await self._end(again)
            failure = _as_load_failure(old.name, error)
            return f"The previous model {old.name} could not be loaded again: {failure.message}"
        logger.info("The previous model {} is loaded again", old.name)
        return f"The previous model {old.name} is loaded again."

    async def _close_current(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await self._end(client)

    async def _end(self, client: EngineClient) -> None:
        await client.close()
        self._clients.discard(client)


def _as_load_failure(name: str, error: Exception) -> ServerError:
    """What a client is told of a load that has failed, which is logged here."""
    if isinstance(error, ServerError):
        logger.error("Loading {} failed: {}", name, error.message)
        return error
    logger.opt(exception=error).error("Loading {} failed for a reason that the server does not know", name)
    return ModelLoadFailed(f"Loading {name} failed: {type(error).__name__}. The server's log says more.")
