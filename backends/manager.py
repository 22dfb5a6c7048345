"""Which models are up: load, swap, roll back, put to sleep, unload."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from loguru import logger

from backends.client import WORKER_COMMAND, EngineClient
from backends.messages import LoadProgress
from backends.model_events import ModelEvent, ModelEvents, ModelState
from backends.process_client import told_of_load
from backends.residents import FOREVER, MB, Lease, Resident, Room
from common.caching import PlanBasis
from common.config_models import LoadSettings, ModelSelection
from common.errors import ErrorRecord, ModelLoadFailed, ModelNotFound, ModelNotLoaded, RequestCancelled, ServerError
from common.model_folder import MODEL_CONFIG, list_models, model_folder
from common.names import path_within, tagged

ManagerState: TypeAlias = Literal["empty", "loading", "ready", "sleeping", "failed"]
# Why a model is not up any more: another one has its room, nobody used it, or it was asked for.
UnloadReason: TypeAlias = Literal["displaced", "idle", "requested"]
ReportProgress: TypeAlias = Callable[[LoadProgress], None]

# For how long requests are told why a model could not be loaded before it is tried again on their behalf: each try
# costs the models that have to make room.
RETRY_SECONDS: Final = 30.0


class Wanted(NamedTuple):
    """A model that a request names.

    Attributes:
        directory: its folder.
        settings: reads what it is loaded with, for one that is neither up nor was loaded with `load()` before. None: it
            is not to be loaded for the request, unless it sleeps; where it is no longer up, that answers which answers
            those that name none.
    """

    directory: Path
    settings: Callable[[], Awaitable[LoadSettings]] | None


class ModelStatus(NamedTuple):
    """How it is with a model.

    Attributes:
        reason: why it has failed, or is being loaded again.
        memory: bytes of device memory that it takes; None where it is not up.
        requests: that use it.
        idle_in: seconds until it is put to sleep if nobody uses it; None: it is in use, or never.
    """

    directory: Path
    state: ModelState
    reason: str | None = None
    memory: int | None = None
    requests: int = 0
    idle_in: float | None = None

    @property
    def answers(self) -> bool:
        """It is up, or a request wakes it."""
        return self.memory is not None or self.state == "sleeping"


@dataclass(eq=False)
class _Waiter:
    """A request that waits for a model; None: for that which answers those that name none."""

    wanted: Wanted | None
    keep_alive: float | None
    lease: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def directory(self) -> Path | None:
        return self.wanted.directory if self.wanted is not None else None


class _Load(NamedTuple):
    directory: Path
    settings: LoadSettings
    was_up: bool  # see `EngineClient`


class _Failure(NamedTuple):
    error: ErrorRecord
    at: float  # of the loop's clock
    costly: bool  # others had made room


async def _nothing(client: EngineClient) -> None:
    pass


def _ignore(record: LoadProgress) -> None:
    pass


class ModelManager:
    """Holds the engine processes that answer, and exchanges them.

    One model is loaded at a time. A load goes: check in a new process while all models serve; where there is no room
    beside them, have those that make room take no more requests, and let those in flight finish (or cancel them); end
    them; load. When the last step fails, they are loaded again. While it waits for requests in flight, a load gives way
    to a change that waits for none, and begins anew after it.

    Requests `acquire()` the model that they need. Those that wait are served in the order in which they came, all that
    wait for the same model at once; a model that is up takes requests while others are waited for, unless it is the one
    that makes room.

    Attributes:
        model_dir: parent of the model folders.
        aliases: more names of models, each with its folder.
        events: what happens to models.
        load_error: why the last load failed; None after one that did not, and before the first.
        on_loaded: awaited with each model that has just been loaded. It must not raise, nor must the next three.
        on_load_ended: called at the end of each load, with whether the model serves.
        on_unload: called with each model that is no longer up, with why.
        on_restart: called after each start of an engine in place of one that has died, with whether the model is back.
    """

    def __init__(
        self,
        model_dir: Path,
        worker_command: Sequence[str] = WORKER_COMMAND,
        *,
        selection: ModelSelection = ModelSelection(),  # noqa: B008 (frozen)
        engine_timeout: float = 0,
    ) -> None:
        """
        Args:
            worker_command, engine_timeout: see `EngineClient`.
            selection: `aliases`, `max_models`, `memory_budget` and `idle_timeout` count.
        """
        self.model_dir = model_dir
        self.aliases = selection.aliases
        self.events = ModelEvents()
        self.load_error: str | None = None
        self.on_loaded: Callable[[EngineClient], Awaitable[None]] = _nothing
        self.on_load_ended: Callable[[bool], None] = lambda loaded: None
        self.on_unload: Callable[[UnloadReason], None] = lambda reason: None
        self.on_restart: Callable[[bool], None] = lambda back: None
        self._worker_command = worker_command
        self._engine_timeout = engine_timeout
        self._room = Room(selection.max_models, selection.memory_budget and selection.memory_budget * MB)
        self._idle_timeout = selection.idle_timeout or FOREVER
        self._residents: dict[Path, Resident] = {}
        self._asleep: dict[Path, EngineClient] = {}  # closed; the longest asleep first
        self._failures: dict[Path, _Failure] = {}
        self._asked_for: dict[Path, LoadSettings] = {}  # what `load()` was called with, until `unload()`
        self._chosen: Path | None = None  # by the last `load()`
        self._clients: set[EngineClient] = set()  # all whose processes may live
        self._closed = False
        self._loading: Path | None = None
        self._succeeds = False  # what is loading will answer requests that name none
        self._predecessor: Resident | None = None  # which does so until then, or until it makes room
        self._lock = asyncio.Lock()  # one change at a time
        self._hurried = 0  # changes that wait for the lock, but would wait for no request
        self._changed = asyncio.Event()  # a model works on no request any more, a waiter has gone, or one is hurried
        self._waiters: list[_Waiter] = []
        self._server: asyncio.Task[None] | None = None  # loads what the waiters wait for
        self._tasks: set[asyncio.Task[None]] = set()  # all that change what is up

    # --- what is there ------------------------------------------------------------------------------------------

    @property
    def current(self) -> EngineClient | None:
        """The model that answers requests which name none, or None. During a swap the old one counts until it stops
        taking requests.

        It is the one that was loaded last with `load()`; where that has made room for another, the one used last. From
        when it makes room for its successor until that is loaded, it is none.
        """
        resident = self._answerer()
        return resident.client if resident is not None else None

    @property
    def sleeping(self) -> EngineClient | None:
        """The model that will be loaded again for a request that names none; its client is closed."""
        if self._answerer() is not None or not self._asleep:
            return None
        return self._asleep.get(self._chosen) if self._chosen in self._asleep else [*self._asleep.values()][-1]

    @property
    def loaded(self) -> int:
        """Number of models that are up."""
        return len(self._residents)

    @property
    def state(self) -> ManagerState:
        if self.current is not None:
            return "ready" if self.current.state != "failed" else "failed"
        if self._loading is not None:
            return "loading"
        if self.sleeping is not None:
            return "sleeping"
        return "failed" if self.load_error else "empty"

    def require(self) -> EngineClient:
        """`current`, or ModelNotLoaded with the reason."""
        if self.current is not None:
            return self.current
        if self._loading is not None:
            raise ModelNotLoaded(f"The model {self._loading.name} is being loaded. Try again in a moment.")
        if self.sleeping is not None:
            raise ModelNotLoaded(f"The model {self.sleeping.name} sleeps. A request for an answer loads it again.")
        if self.load_error is not None:
            raise ModelNotLoaded(f"No model is loaded; the last load failed: {self.load_error}")
        raise ModelNotLoaded("No model is loaded. Load one with POST /v1/model/load or set model.model_name.")

    def list_models(self) -> list[str]:
        """Names of the folders in `model_dir` that hold a config.json, sorted without regard to case."""
        return list_models(self.model_dir)

    def resolve(self, name: str, param: str = "model_name") -> Path:
        """Folder of the model `name`, which may be an alias; see `model_folder` for what it raises."""
        return model_folder(self.model_dir, self._unaliased(name), param)

    def known(self, name: str) -> EngineClient | None:
        """The model that is up or asleep by that name, which may be an alias, or the last part of a path where there
        is no such folder."""
        name = self._unaliased(name)
        clients = {resident.directory: resident.client for resident in self._residents.values()} | self._asleep
        path = path_within(self.model_dir.absolute(), name)
        if path in clients:
            return clients[path]
        found = next((client for directory, client in clients.items() if directory.name == name), None)
        is_another = found is not None and path is not None and os.path.isfile(path / MODEL_CONFIG)
        return None if is_another else found

    def _unaliased(self, name: str) -> str:
        """A name that is no alias. Requests may leave out an alias's tag, if that is latest."""
        return self.aliases.get(name, self.aliases.get(tagged(name), name))

    def client_of(self, directory: Path) -> EngineClient | None:
        """That of a model that is up or asleep."""
        resident = self._residents.get(directory)
        return resident.client if resident is not None else self._asleep.get(directory)

    def name_of(self, directory: Path) -> str:
        """A model's name, whether it is up or not: its path in `model_dir`."""
        parent = self.model_dir.absolute()
        return directory.relative_to(parent).as_posix() if directory.is_relative_to(parent) else directory.name

    def statuses(self) -> list[ModelStatus]:
        """Of all models of which there is more to say than that they are not loaded; first that which answers."""
        answerer = self._answerer()
        residents = sorted(self._residents.values(), key=lambda resident: (resident is not answerer, -resident.used_at))
        directories = [resident.directory for resident in residents]
        directories += [self._loading] if self._loading is not None else []
        return [self.status(directory) for directory in dict.fromkeys([*directories, *self._asleep, *self._failures])]

    def status(self, directory: Path) -> ModelStatus:
        resident, failure = self._residents.get(directory), self._failures.get(directory)
        if resident is not None and not (resident.closing and self._loading == directory):
            client = resident.client
            state: ModelState = "failed" if resident.failed else "loaded" if client.state == "ready" else "loading"
            return ModelStatus(directory, state, client.failure, resident.memory, resident.requests, resident.idle_in)
        if self._loading == directory:
            return ModelStatus(directory, "loading")
        if directory in self._asleep:
            return ModelStatus(directory, "sleeping")
        if failure is not None:
            return ModelStatus(directory, "failed", failure.error.message)
        return ModelStatus(directory, "unloaded")

    async def plan_basis(self, directory: Path, settings: LoadSettings) -> PlanBasis | None:
        """What checkpoints of a model would cost if it were loaded; None without recurrent layers.

        Asks a process that ends without having read a weight. What is up is not touched.

        Raises:
            ServerError: what is wrong with the model or the settings.
        """
        client = self._new_client(_Load(directory, settings, was_up=False))
        try:
            await client.prepare()
            return client.plan
        finally:
            await self._end(client)

    # --- requests -----------------------------------------------------------------------------------------------

    async def acquire(self, wanted: Wanted | None = None, *, keep_alive: float | None = None) -> Lease:
        """The right to use a model, which is loaded where it is not up.

        Args:
            wanted: None: that which answers requests that name no model.
            keep_alive: see `Resident.lease()`.

        Raises:
            ModelNotLoaded: no model is named, and none is there.
            ServerError: why the model could not be loaded.
            RequestCancelled: the server is shutting down.
        """
        if self._closed:
            raise _shutting_down()
        waiter = _Waiter(wanted, keep_alive)
        if (resident := self._up(wanted)) is not None:
            return resident.lease(keep_alive)
        if wanted is None and not (self._tasks or self._asleep):
            self.require()  # nothing will come
        self._waiters.append(waiter)
        if self._server is None or self._server.done():
            self._server = self._start(self._serve_waiters())
        try:
            return await waiter.lease
        except BaseException:
            self._withdraw(waiter)
            raise

    def keep(self, directory: Path, keep_alive: float) -> None:
        """Say anew how long a model stays up, which nothing else is wanted of; see `Resident.lease()`."""
        if (resident := self._residents.get(directory)) is not None:
            resident.lease(keep_alive).release()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Nobody reads what a waiter gets."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._changed.set()
        elif waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
            waiter.lease.result().release()

    def _up(self, wanted: Wanted | None) -> Resident | None:
        """What a request waits for, if it takes requests. A model that has failed is loaded again where it may be."""
        if wanted is None:
            return self._answerer()
        resident = self._residents.get(wanted.directory)
        if resident is None or resident.closing or (resident.failed and wanted.settings is not None):
            return None
        return resident

    def _answerer(self) -> Resident | None:
        up = [resident for resident in self._residents.values() if not resident.closing]
        if self._succeeds:
            return self._predecessor if self._predecessor in up else None
        chosen = next((resident for resident in up if resident.directory == self._chosen), None)
        if chosen is not None:
            return chosen
        if self._chosen is not None and (self._chosen == self._loading or self._chosen in self._asleep):
            return None
        return max(up, key=lambda resident: resident.used_at, default=None)

    def _grant(self) -> None:
        """Hand their leases to those whose model is up."""
        for waiter in list(self._waiters):
            wanted = waiter.wanted
            if wanted is not None and wanted.settings is None and self.client_of(wanted.directory) is None:
                waiter.wanted = wanted = None
            if not waiter.lease.done() and (resident := self._up(wanted)) is not None:
                self._waiters.remove(waiter)
                waiter.lease.set_result(resident.lease(waiter.keep_alive))

    def _refuse(self, error: ServerError, directories: Sequence[Path | None]) -> None:
        """Tell those who wait for a model that they do so in vain."""
        for waiter in [waiter for waiter in self._waiters if waiter.directory in directories]:
            self._waiters.remove(waiter)
            if not waiter.lease.done():
                # Each gets one of its own, which will have its traceback.
                waiter.lease.set_exception(ServerError.from_record(error.to_record()))

    async def _serve_waiters(self) -> None:
        """Load what the first of those who wait is waiting for, until nobody waits."""
        while self._waiters:
            async with self._lock:
                self._grant()
                if self._waiters:
                    await self._serve(self._waiters[0])

    async def _serve(self, waiter: _Waiter) -> None:
        directory = waiter.directory
        try:
            load = await self._to_load_for(waiter)
            directory = load.directory
            awaited = (waiter.directory, directory)
            await self._exchange(load, wanted=lambda: any(other.directory in awaited for other in self._waiters))
        except ServerError as error:
            self._refuse(error, (waiter.directory, directory))
        except Exception as error:
            self._refuse(told_of_load(directory.name if directory else "the model", error), (waiter.directory,))

    async def _to_load_for(self, waiter: _Waiter) -> _Load:
        wanted = waiter.wanted
        directory = wanted.directory if wanted is not None else (self.sleeping or self.require()).directory
        failure = self._failures.get(directory)
        if failure is not None and failure.costly and asyncio.get_running_loop().time() < failure.at + RETRY_SECONDS:
            raise ServerError.from_record(failure.error)
        client = self.client_of(directory)  # which has failed, or sleeps
        settings = client.settings if client is not None else self._asked_for.get(directory)
        if settings is not None:
            return _Load(directory, settings, was_up=True)
        assert wanted is not None
        assert wanted.settings is not None, "neither up nor asleep, and not to be loaded"
        return _Load(directory, await wanted.settings(), was_up=False)

    # --- changes ------------------------------------------------------------------------------------------------

    async def load(
        self, directory: Path, settings: LoadSettings, *, skip_queue: bool = False
    ) -> AsyncIterator[LoadProgress]:
        """Load a model, which then answers requests that name none, yielding progress.

        It is loaded beside those that are up where there is room, else in place of the least recently used. The load
        goes on to its end when the caller stops iterating. What is loaded already, with equal settings, is answered at
        once with one progress record.

        Args:
            directory: folder of the model.
            settings: everything that it is loaded with.
            skip_queue: cancel the requests in flight, of models that make room, instead of waiting for them.

        Raises:
            ServerError: what is wrong with the model or the settings; no loaded model was touched.
            ModelLoadFailed: loading failed; the message says whether the previous model serves again.
            RequestCancelled: the load was given up, as the server is shutting down.
        """
        progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
        task = self._start(self._load(directory, settings, skip_queue, progress.put_nowait))
        task.add_done_callback(lambda done: progress.put_nowait(None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # logged where it is raised
        while (record := await progress.get()) is not None:
            yield record
        if task.cancelled():
            raise RequestCancelled(f"Loading {directory.name} was given up: the server is shutting down.")
        await task

    async def unload(self, directory: Path | None = None) -> None:
        """End a loaded model; its requests in flight get `RequestCancelled`. One that sleeps is not loaded again.

        Args:
            directory: of the model; None: that which answers requests that name none.

        Raises:
            ModelNotFound: it is neither up nor asleep.
            ModelNotLoaded: no model is named, and none is there.
        """
        async with self._changing(hurried=True):
            client = self.sleeping
            if directory is None:
                directory = (client or self.require()).directory
            resident = self._residents.get(directory)
            if resident is None and directory not in self._asleep:
                raise ModelNotFound(f"The model {directory.name} is not loaded.", param="model_name")
            self._asleep.pop(directory, None)
            self._asked_for.pop(directory, None)
            self._chosen = None if self._chosen == directory else self._chosen
            self.load_error = None
            if resident is not None:
                await self._remove(resident, "requested")
            else:
                self._tell(directory)

    async def stop_loading(self) -> None:
        """Give up loads in progress, and take no more; nobody waits for one any longer. What serves goes on."""
        self._closed = True
        self.events.close()
        for task in self._tasks:
            task.cancel()
        for waiter in list(self._waiters):
            self._refuse(_shutting_down(), (waiter.directory,))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self, force: bool = False) -> None:
        """End everything, loads in progress included; nothing is loaded any more. Safe to call more than once.

        Args:
            force: kill the engine processes, also where another call is waiting for them to end in order.
        """
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(client.close(force) for client in self._clients), return_exceptions=True)
        await self.stop_loading()
        async with self._lock:
            for resident in list(self._residents.values()):
                await self._remove(resident, "requested")

    async def _load(self, directory: Path, settings: LoadSettings, skip_queue: bool, report: ReportProgress) -> None:
        ended = False
        while not ended:
            async with self._changing(hurried=skip_queue):
                old = self._residents.get(directory)
                if old is not None and old.client.state == "ready" and old.client.settings == settings:
                    report(LoadProgress(component="model", module=1, modules=1))
                    self._choose(directory, settings)
                    return
                load = _Load(directory, settings, was_up=False)
                ended = await self._exchange(load, succeeds=True, skip_queue=skip_queue, report=report)

    @asynccontextmanager
    async def _changing(self, *, hurried: bool = False) -> AsyncIterator[None]:
        """While nobody else changes what is up.

        Args:
            hurried: it will wait for no request, and so must not wait for a change that does.
        """
        self._hurried += hurried
        self._changed.set()
        try:
            await self._lock.acquire()
        finally:
            self._hurried -= hurried
        try:
            yield
        finally:
            self._lock.release()

    def _choose(self, directory: Path, settings: LoadSettings) -> None:
        self._chosen = directory
        self._asked_for[directory] = settings

    async def _exchange(
        self,
        load: _Load,
        *,
        succeeds: bool = False,
        skip_queue: bool = False,
        report: ReportProgress = _ignore,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Bring a model up, in place of others where it has no room beside them. Only while holding the lock.

        Args:
            succeeds: it will answer requests that name none.
            wanted: whether anybody still waits for it, asked until others have made room.

        Returns:
            Whether it is up. Else nobody waits for it any more, or a hurried change comes first.
        """
        directory = load.directory
        replaced = self._residents.get(directory)
        new = self._new_client(load)
        logger.info("Loading {}", directory.name)
        self._loading = directory
        self._predecessor, self._succeeds = self._answerer(), succeeds
        self._tell(directory)
        displaced: list[Resident] = []
        try:
            await new.prepare()
            self._room.check(directory.name, new.memory)
            leaving = await self._clear_room(new, replaced, skip_queue, wanted)
            if leaving is None:
                logger.info("{} is not loaded now: nobody waits for it any more, or something comes first", new.name)
                await self._end(new)
                return False
            await new.check_prepared()
            displaced = [resident for resident in leaving if not resident.failed]
            for resident in leaving:
                await self._remove(resident, "displaced")
            await self._bring_up(new, report, self._idle_timeout)
        except Exception as error:
            await self._end(new)
            failure = told_of_load(directory.name, error)
            self.load_error = failure.message
            self._failures[directory] = _Failure(
                failure.to_record(), asyncio.get_running_loop().time(), costly=bool(displaced)
            )
            self.on_load_ended(False)
            if not displaced:
                raise failure from error
            again = " ".join([await self._roll_back(resident) for resident in displaced])
            raise ModelLoadFailed(f"{failure.message.rstrip('.')}. {again}") from error
        except BaseException:
            await self._end(new)
            raise
        else:
            self.load_error = None
            self.on_load_ended(True)
            if succeeds:
                self._choose(directory, load.settings)
            return True
        finally:
            self._loading = None
            self._predecessor, self._succeeds = None, False
            for resident in self._residents.values():
                resident.closing = False
            self._tell(directory)
            self._grant()

    async def _clear_room(
        self, new: EngineClient, replaced: Resident | None, skip_queue: bool, wanted: Callable[[], bool]
    ) -> list[Resident] | None:
        """The models that make room for another. They take no more requests, and work on none unless `skip_queue`.

        While some are still busy, others may come to be idle and make room in their place. None: nobody wants the other
        any more, or a hurried change comes first.
        """
        others = [resident for resident in self._residents.values() if resident is not replaced]
        while True:
            self._changed.clear()
            if not wanted():
                return None
            leaving = self._room.makers(others, new.memory)
            leaving += [replaced] if replaced is not None else []
            for resident in self._residents.values():
                resident.closing = resident in leaving
            self._grant()  # to those who wait for what stays after all
            if skip_queue or not any(resident.busy for resident in leaving):
                return leaving
            if self._hurried:
                return None
            await self._changed.wait()

    def _new_client(self, load: _Load) -> EngineClient:
        if self._closed:
            raise RequestCancelled("The server is shutting down; it loads no model any more.")
        client = EngineClient(
            load.directory,
            load.settings,
            self._worker_command,
            engine_timeout=self._engine_timeout,
            was_up=load.was_up,
        )
        client.on_restart = partial(self._restarted, load.directory)
        self._clients.add(client)
        return client

    def _restarted(self, directory: Path, back: bool) -> None:
        self.on_restart(back)
        self._tell(directory)

    async def _bring_up(self, client: EngineClient, report: ReportProgress, keep_alive: float) -> None:
        async for record in client.load():
            report(record)
            self.events.tell(ModelEvent(self.name_of(client.directory), "loading", progress=record))
        await self.on_loaded(client)
        self._residents[client.directory] = Resident(
            client, keep_alive, on_free=self._changed.set, on_idle=self._sleep_soon
        )
        self._failures.pop(client.directory, None)
        self._asleep.pop(client.directory, None)
        # Those asleep keep their places only until another model needs them.
        while self._asleep and len(self._residents) + len(self._asleep) > self._room.models:
            del self._asleep[next(iter(self._asleep))]

    async def _roll_back(self, resident: Resident) -> str:
        old = resident.client
        again = self._new_client(_Load(old.directory, old.settings, was_up=True))
        try:
            await again.prepare()
            await self._bring_up(again, _ignore, resident.keep_alive)
        except Exception as error:
            await self._end(again)
            failure = told_of_load(old.name, error)
            return f"The previous model {old.name} could not be loaded again: {failure.message}"
        finally:
            self._tell(old.directory)
        logger.info("The previous model {} is loaded again", old.name)
        return f"The previous model {old.name} is loaded again."

    def _sleep_soon(self, resident: Resident) -> None:
        if not self._closed:
            self._start(self._put_to_sleep(resident, resident.used_at))

    async def _put_to_sleep(self, resident: Resident, used_at: float) -> None:
        async with self._lock:
            used = resident.busy or resident.used_at != used_at
            if self._residents.get(resident.directory) is resident and not used:
                logger.info("Nobody has used {} for a while; it is unloaded until somebody does", resident.client.name)
                self._asleep[resident.directory] = resident.client
                await self._remove(resident, "idle")

    async def _remove(self, resident: Resident, reason: UnloadReason) -> None:
        del self._residents[resident.directory]
        resident.gone()
        await self._end(resident.client)
        self.on_unload(reason)
        self._tell(resident.directory, reason)

    async def _end(self, client: EngineClient) -> None:
        await client.close()
        self._clients.discard(client)

    def _tell(self, directory: Path, reason: str | None = None) -> None:
        status = self.status(directory)
        self.events.tell(ModelEvent(self.name_of(directory), status.state, reason=status.reason or reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # It outlives the request that asks for it, so it must not carry that request's id into the log.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _shutting_down() -> RequestCancelled:
    return RequestCancelled("The server is shutting down. Send the request again once it is back.")
