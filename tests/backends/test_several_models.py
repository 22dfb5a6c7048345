"""Several models: who waits for whom, who makes room, who sleeps.

Where no model has to say anything, clients stand in that need no process, so that nothing takes time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from backends.client import EngineClient
from backends.manager import ModelManager, Wanted
from backends.messages import LoadProgress
from backends.model_events import ModelEvent
from backends.residents import Lease
from common.config_models import LoadSettings, ModelSelection
from common.errors import (
    ErrorRecord,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotLoaded,
    RequestCancelled,
    ServerBusy,
    ServerError,
)
from tests.scripted import ScriptedEngine, load_settings, say
from tests.scripted_worker import ModelScript, Play, Script

NAMES = ("alpha", "beta", "gamma")
MB = 1 << 20


class InstantClient(EngineClient):
    """Its model is there as soon as it is asked for."""

    sizes: ClassVar[dict[str, int]] = {}  # MB by name
    torn: ClassVar[set[str]] = set()  # names of those whose weights cannot be read
    doors: ClassVar[dict[str, asyncio.Event]] = {}  # by name; it has to be open for the load to go on

    async def prepare(self) -> None:
        self.memory = self.sizes.get(self.name, 0) * MB

    async def check_prepared(self) -> None:
        pass

    async def load(self) -> AsyncIterator[LoadProgress]:
        for module in (1, 2):
            await asyncio.sleep(0)
            yield LoadProgress(component="model", module=module, modules=2)
        if (door := self.doors.get(self.name)) is not None:
            await door.wait()
        if self.name in self.torn:
            raise ModelLoadFailed("torn")
        self._is_ready()


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.manager.EngineClient", InstantClient)


class Models:
    """A manager, and requests for its models."""

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager
        self.unloads: list[str] = []
        self.read: list[str] = []  # names of models whose settings were read for a request
        manager.on_unload = self.unloads.append

    def acquire(
        self, name: str | None, keep_alive: float | None = None, *, may_load: bool = True
    ) -> asyncio.Task[Lease]:
        wanted = self._wanted(name)
        if wanted is not None and not may_load:
            wanted = wanted._replace(settings=None)
        return asyncio.create_task(self.manager.acquire(wanted, keep_alive=keep_alive))

    async def use(self, name: str | None, keep_alive: float | None = None) -> str:
        """Have a model loaded, and let go of it; gives its name."""
        lease = await self.acquire(name, keep_alive)
        lease.release()
        return lease.client.name

    async def load(self, name: str, *, skip_queue: bool = False, **model: object) -> None:
        async for _ in self.manager.load(self.manager.resolve(name), load_settings(**model), skip_queue=skip_queue):
            pass

    def makes_room(self, name: str) -> bool:
        """Whether a model that is up takes no more requests."""
        return self.manager._residents[self.manager.resolve(name)].closing

    @property
    def up(self) -> list[str]:
        """Names of the models that are up, that which answers first."""
        return [status.directory.name for status in self.manager.statuses() if status.state == "loaded"]

    def _wanted(self, name: str | None) -> Wanted | None:
        if name is None:
            return None
        directory = self.manager.resolve(name)

        async def settings() -> LoadSettings:
            self.read.append(directory.name)
            return load_settings()

        return Wanted(directory, settings)


@asynccontextmanager
async def models(engine: ScriptedEngine, script: Script | None = None, **selection: object) -> AsyncIterator[Models]:
    for name in NAMES:
        if not (engine.model_dir / name).exists():
            engine.add_model(name)
    engine.write(script or Script())
    manager = engine.manager(selection=ModelSelection.model_validate(selection))
    try:
        yield Models(manager)
    finally:
        await manager.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# --- room ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instant")
async def test_the_least_recently_used_of_the_idle_makes_room(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=2) as given:
        await given.use("alpha")
        await given.use("beta")
        assert (given.up, given.manager.loaded) == (["beta", "alpha"], 2)
        held = await given.acquire("alpha")  # in use, though beta was used later
        await given.acquire("beta")
        # Both are in use: the first to be free goes.
        waiting = given.acquire("gamma")
        await until(lambda: given.manager.status(given.manager.resolve("alpha")).requests == 1)
        held.release()
        assert (await waiting).client.name == "gamma"
        assert (given.up, given.unloads) == (["gamma", "beta"], ["displaced"])
        assert given.read == ["alpha", "beta", "gamma"]
        with pytest.raises(ModelNotFound, match="The model alpha is not loaded"):
            await given.manager.unload(given.manager.resolve("alpha"))


@pytest.mark.usefixtures("instant")
async def test_who_waits_is_not_passed_by_and_the_same_model_serves_all_at_once(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=1) as given:
        first = await given.acquire("alpha")
        order: list[str] = []

        def ask(name: str | None, label: str) -> asyncio.Task[Lease]:
            task = given.acquire(name)
            task.add_done_callback(lambda done: order.append(label))
            return task

        other = ask("beta", "beta 1")
        while given.manager.current is not None:  # alpha takes no more requests
            await asyncio.sleep(0.01)
        again, unnamed, more = ask("alpha", "alpha 2"), ask(None, "unnamed"), ask("beta", "beta 2")
        await asyncio.sleep(0.05)
        assert order == []
        first.release()
        beta = await other
        assert [(await task).client.name for task in (unnamed, more)] == ["beta", "beta"]
        await asyncio.sleep(0)
        assert order == ["beta 1", "unnamed", "beta 2"]
        for lease in (beta, await unnamed, await more):
            assert not again.done()
            lease.release()
        assert (await again).client.name == "alpha"


@pytest.mark.usefixtures("instant")
async def test_a_request_does_not_bring_back_what_was_swapped_for_another(scripted: ScriptedEngine) -> None:
    """Where requests load no models, a name is that of the model that is up, or says nothing."""
    async with models(scripted, max_models=1) as given:
        await given.load("alpha")
        held = await given.acquire("alpha", may_load=False)
        swap = asyncio.create_task(given.load("beta"))
        await until(lambda: given.manager.current is None)
        late = given.acquire("alpha", may_load=False)
        await asyncio.sleep(0)
        held.release()
        await swap
        assert (await late).client.name == "beta"
        assert (given.up, given.unloads) == (["beta"], ["displaced"])


@pytest.mark.usefixtures("instant")
async def test_others_are_served_while_one_makes_room(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=2) as given:
        old = await given.acquire("alpha")
        young = await given.acquire("beta")
        waiting = given.acquire("gamma")
        await until(lambda: given.makes_room("alpha"))
        behind = given.acquire("alpha")
        assert await asyncio.wait_for(given.use("beta"), 5) == "beta"
        # The other one is free first, so alpha stays, and serves who had to wait.
        young.release()
        assert (await waiting).client.name == "gamma"
        assert (await behind).client is old.client
        assert given.unloads == ["displaced"]
        assert sorted(given.up) == ["alpha", "gamma"]


@pytest.mark.usefixtures("instant")
async def test_the_budget_counts_what_models_take(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.add_model("delta")
    monkeypatch.setattr(InstantClient, "sizes", {"alpha": 400, "beta": 500, "gamma": 601, "delta": 1025})
    async with models(scripted, max_models=9, memory_budget=1024) as given:
        await given.use("alpha")
        await given.use("beta")
        await given.use("alpha")
        with pytest.raises(InvalidRequest, match="delta needs about 1025 MB, but model.memory_budget is 1024"):
            await given.use("delta")
        assert sorted(given.up) == ["alpha", "beta"]
        await given.use("gamma")  # 601 + 400 fit, 601 + 500 do not
        assert sorted(given.up) == ["alpha", "gamma"]
        statuses = {status.directory.name: status for status in given.manager.statuses()}
        assert statuses["gamma"].memory == 601 * MB
        assert statuses["delta"].state == "failed"


@pytest.mark.usefixtures("instant")
async def test_who_has_begun_to_make_room_goes_on_with_it(scripted: ScriptedEngine) -> None:
    """Else two busy models spare each other in turns, and who waits for room gets none."""
    async with models(scripted, max_models=2) as given:
        first, second = await given.acquire("alpha"), await given.acquire("alpha")
        young = await given.acquire("beta")
        waiting = given.acquire("gamma")
        await until(lambda: given.makes_room("alpha"))
        behind = given.acquire("alpha")
        first.release()  # so that beta is now the least recently used
        gone = given.acquire("gamma")
        await asyncio.sleep(0)
        gone.cancel()  # so that it is decided again who makes room
        for _ in range(5):
            await asyncio.sleep(0)
        assert (given.makes_room("alpha"), given.makes_room("beta"), behind.done()) == (True, False, False)
        second.release()
        assert (await waiting).client.name == "gamma"
        young.release()
        assert (await behind).client.name == "alpha"


@pytest.mark.usefixtures("instant")
async def test_the_one_that_answers_does_so_until_it_makes_room(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(scripted, max_models=2) as given:
        await given.use("beta")
        door = asyncio.Event()
        monkeypatch.setattr(InstantClient, "doors", {"gamma": door})
        loading = asyncio.create_task(given.load("gamma"))
        await until(lambda: given.manager.status(given.manager.resolve("gamma")).state == "loading")
        assert await given.use(None) == "beta"
        door.set()
        await loading
        assert await given.use(None) == "gamma"


@pytest.mark.usefixtures("instant")
async def test_no_other_answers_while_that_which_is_to_answer_is_loaded(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(scripted, max_models=2) as given:
        await given.load("alpha")
        await given.use("beta")
        for name in ("alpha", "gamma"):
            door = asyncio.Event()
            monkeypatch.setattr(InstantClient, "doors", {name: door})
            held = await given.acquire("beta")
            loading = asyncio.create_task(given.load(name, max_seq_len=1000))
            await until(lambda: given.manager.state == "loading")
            with pytest.raises(ModelNotLoaded, match=f"{name} is being loaded"):
                given.manager.require()
            unnamed = given.acquire(None)
            assert await given.use("beta") == "beta"
            assert not unnamed.done()
            door.set()
            await loading
            assert (await unnamed).client.name == name
            (await unnamed).release()
            held.release()


@pytest.mark.parametrize("what", ["unload", "unload another", "skip_queue"])
@pytest.mark.usefixtures("instant")
async def test_what_waits_for_no_request_does_not_wait_for_a_load_that_does(
    scripted: ScriptedEngine, what: str
) -> None:
    async with models(scripted, max_models=2) as given:
        stuck, other = await given.acquire("alpha"), await given.acquire("beta")
        waiting = given.acquire("gamma")
        await until(lambda: given.makes_room("alpha"))
        by_admin = asyncio.create_task(given.load("beta", max_seq_len=1000))
        await asyncio.sleep(0)
        if what == "skip_queue":
            await asyncio.wait_for(given.load("beta", skip_queue=True, max_seq_len=500), 5)
            assert (other.client.state, stuck.client.state) == ("closed", "ready")
        else:
            name = "alpha" if what == "unload" else "beta"
            await asyncio.wait_for(given.manager.unload(given.manager.resolve(name)), 5)
            assert (await waiting).client.name == "gamma"
        # Who had to give way comes to its turn.
        stuck.release()
        other.release()
        (await waiting).release()
        await by_admin
        current = given.manager.current
        assert current is not None
        assert (current.name, current.settings.model.max_seq_len) == ("beta", 1000)


# --- what goes wrong ----------------------------------------------------------------------------------------------


async def test_a_load_that_fails_is_told_to_all_who_wait_and_costs_the_others_nothing(scripted: ScriptedEngine) -> None:
    broken = ModelScript(load_error=ErrorRecord(code="model_load_failed", message="torn"), load_seconds=0.3)
    async with models(scripted, Script(models={"beta": broken}), max_models=1) as given:
        await given.load("alpha", max_seq_len=1000)
        waiting = [given.acquire("beta"), given.acquire("beta")]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in results] == ["torn. The previous model alpha is loaded again."] * 2
        assert results[0] is not results[1]
        lease = await given.acquire(None)
        assert (lease.client.name, lease.client.settings.model.max_seq_len) == ("alpha", 1000)
        loads = len(given.unloads)
        with pytest.raises(ModelLoadFailed, match="torn"):
            await given.use("beta")  # without another try, for which alpha would have to go
        assert len(given.unloads) == loads
        lease.release()
        scripted.write(Script())
        await given.load("beta")
        assert given.up == ["beta"]


@pytest.mark.usefixtures("instant")
async def test_who_goes_away_is_not_loaded_for(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=1) as given:
        held = await given.acquire("alpha")
        gone = given.acquire("beta")
        while given.manager.current is not None:
            await asyncio.sleep(0.01)
        gone.cancel()
        await until(lambda: given.manager.current is not None)
        assert given.manager.status(given.manager.resolve("beta")).state == "unloaded"
        assert given.manager.load_error is None
        assert await given.use("alpha") == "alpha"
        held.release()


@pytest.mark.usefixtures("instant")
async def test_a_lease_that_comes_as_its_request_goes_is_given_back(scripted: ScriptedEngine) -> None:
    async with models(scripted) as given:
        late, grant = given.acquire("alpha"), given.manager._grant

        def grant_and_go() -> None:
            grant()
            if given.manager.loaded:
                late.cancel()

        given.manager._grant = grant_and_go  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await late
        assert [status.requests for status in given.manager.statuses()] == [0]


async def test_a_model_that_dies_leaves_the_others_alone(scripted: ScriptedEngine) -> None:
    async with models(scripted, Script(plays=[Play(when="die", crash_after=0)]), max_models=2) as given:
        alpha, beta = await given.acquire("alpha"), await given.acquire("beta")
        with pytest.raises(ServerError):
            await say(alpha.client, "die")
        assert await say(beta.client) == "Hello world"
        assert await say(alpha.client) == "Hello world"  # once it is back


@pytest.mark.usefixtures("instant")
async def test_one_that_has_failed_is_loaded_again_for_a_request_that_may_load(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=1) as given:
        await given.load("alpha", max_seq_len=1000)
        lease = await given.acquire("alpha")
        lease.client.state = "failed"
        stuck = await given.acquire("alpha", may_load=False)
        assert stuck.client is lease.client
        lease.release()
        stuck.release()
        again = (await given.acquire("alpha")).client
        assert (again.state, again.settings.model.max_seq_len) == ("ready", 1000)
        assert (given.up, given.unloads) == (["alpha"], ["displaced"])


@pytest.mark.usefixtures("instant")
async def test_one_that_has_failed_comes_back_with_the_settings_that_it_had(scripted: ScriptedEngine) -> None:
    """Also those that it has got since it was loaded, as by adapters."""
    async with models(scripted) as given:
        for name in ("alpha", "beta"):
            if name == "beta":
                await given.load("beta")
            lease = await given.acquire(name)
            lora = lease.client.settings.lora.model_copy(update={"lora_dir": "elsewhere"})
            lease.client.settings = lease.client.settings.model_copy(update={"lora": lora})
            lease.client.state = "failed"
            lease.release()
            again = (await given.acquire(name)).client
            assert again is not lease.client
            assert (again.settings, again._was_up) == (lease.client.settings, True)
            await given.manager.unload()


@pytest.mark.usefixtures("instant")
async def test_all_that_made_room_come_back_as_they_were(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InstantClient, "sizes", {"alpha": 1, "beta": 1, "gamma": 2})
    async with models(scripted, max_models=3, memory_budget=2, idle_timeout=1000) as given:
        await given.use("alpha", keep_alive=-1)
        await given.use("beta")
        monkeypatch.setattr(InstantClient, "torn", {"gamma"})
        with pytest.raises(
            ModelLoadFailed, match=r"^torn\. The previous model alpha is loaded again\. The previous model beta is load"
        ):
            await given.use("gamma")
        statuses = {status.directory.name: status for status in given.manager.statuses()}
        assert {name: status.state for name, status in statuses.items()} == {
            "alpha": "loaded", "beta": "loaded", "gamma": "failed",
        }  # fmt: skip
        assert statuses["alpha"].idle_in is None
        assert statuses["beta"].idle_in is not None
        # One does not come back; the other does, and the one that asks is told of both.
        given.manager._failures.clear()
        monkeypatch.setattr(InstantClient, "torn", {"gamma", "alpha"})
        with pytest.raises(
            ModelLoadFailed, match=r"alpha could not be loaded again: torn The previous model beta is loaded again\.$"
        ):
            await given.use("gamma")
        assert given.up == ["beta"]
        assert await given.use("beta") == "beta"


@pytest.mark.usefixtures("instant")
async def test_a_sleeper_that_cannot_wake_does_not_cost_the_others_again_and_again(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InstantClient, "sizes", {"alpha": 2, "beta": 2})
    async with models(scripted, max_models=2, memory_budget=3) as given:
        await given.load("alpha")
        await given.use("alpha", keep_alive=0)
        await until(lambda: given.manager.state == "sleeping")
        await given.use("beta")
        monkeypatch.setattr(InstantClient, "torn", {"alpha"})
        for name in (None, "alpha", None):
            with pytest.raises(ModelLoadFailed, match="torn"):
                await given.use(name)
        assert given.unloads == ["idle", "displaced"]


async def test_one_that_has_failed_is_not_rolled_back_to(scripted: ScriptedEngine) -> None:
    script = Script()
    async with models(scripted, script, max_models=1) as given:
        await given.load("alpha")
        lease = await given.acquire("alpha")
        lease.client.state = "failed"
        lease.release()
        script.models["alpha"] = ModelScript(load_error=ErrorRecord(code="model_load_failed", message="torn"))
        scripted.write(script)
        with pytest.raises(ModelLoadFailed, match="^torn$"):
            await given.use("alpha")
        assert (given.up, given.manager.state) == ([], "failed")


async def test_the_end_of_the_server_ends_the_waiting(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=1) as given:
        held = await given.acquire("alpha")
        waiting = given.acquire("beta")
        follower = given.manager.events.follow()
        while given.manager.current is not None:
            await asyncio.sleep(0.01)
        await given.manager.stop_loading()
        for task in (waiting, given.acquire("alpha")):
            with pytest.raises(RequestCancelled, match="shutting down"):
                await task
        assert [event.state async for event in follower]
        assert await say(held.client) == "Hello world"


# --- sleep --------------------------------------------------------------------------------------------------------


async def test_who_is_not_used_sleeps_until_it_is(scripted: ScriptedEngine) -> None:
    async with models(scripted, idle_timeout=1) as given:
        await given.load("alpha", max_seq_len=1000)
        held = await given.acquire(None, keep_alive=0.1)
        await asyncio.sleep(0.2)
        assert given.up == ["alpha"]
        held.release()
        manager = given.manager
        await until(lambda: given.unloads == ["idle"])
        assert (manager.current, manager.state) == (None, "sleeping")
        assert manager.sleeping is not None
        with pytest.raises(ModelNotLoaded, match="alpha sleeps"):
            manager.require()
        assert (manager.sleeping.name, manager.known("alpha")) == ("alpha", manager.sleeping)
        lease = await given.acquire(None, keep_alive=-1)
        assert lease.client.settings.model.max_seq_len == 1000
        lease.release()
        assert manager.status(lease.client.directory).idle_in is None
        await given.use("alpha", keep_alive=0)
        await until(lambda: manager.state == "sleeping")
        await manager.unload()
        assert manager.state == "empty"
        with pytest.raises(ModelNotLoaded, match="No model is loaded"):
            await given.use(None)


@pytest.mark.usefixtures("instant")
async def test_a_sleeper_keeps_its_place_until_another_needs_it(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=2) as given:
        await given.load("alpha")
        await given.use("alpha", keep_alive=0)
        await until(lambda: given.manager.state == "sleeping")
        await given.use("beta")
        assert given.manager.current is None  # alpha is to answer, once it is awake
        await given.load("gamma")
        assert given.manager.known("alpha") is None
        assert given.up == ["gamma", "beta"]


@pytest.mark.usefixtures("instant")
async def test_a_model_is_told_to_sleep_without_being_used(scripted: ScriptedEngine) -> None:
    async with models(scripted, max_models=2) as given:
        held = await given.acquire("alpha")
        for name in ("alpha", "beta"):
            given.manager.keep(given.manager.resolve(name), 0)
        await asyncio.sleep(0.01)
        assert given.up == ["alpha"]
        held.release()
        await until(lambda: given.manager.state == "sleeping")
        assert given.read == ["alpha"]


@pytest.mark.usefixtures("instant")
async def test_a_model_that_is_gone_has_no_alarm(scripted: ScriptedEngine) -> None:
    async with models(scripted, idle_timeout=1000) as given:
        held = await given.acquire("alpha")
        [resident] = given.manager._residents.values()
        await given.manager.unload()
        held.release()
        assert resident._alarm is None


# --- names and events ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instant")
async def test_aliases_are_names(scripted: ScriptedEngine) -> None:
    (scripted.model_dir / "author" / "4.0bpw").mkdir(parents=True)
    (scripted.model_dir / "author" / "4.0bpw" / "config.json").write_text("{}", encoding="utf-8")
    async with models(scripted, aliases={"gpt-4o": "author/4.0bpw", "nothing": "none"}) as given:
        folder = scripted.model_dir / "author" / "4.0bpw"
        assert given.manager.resolve("gpt-4o") == folder
        with pytest.raises(ModelNotFound):
            given.manager.resolve("nothing")
        assert given.manager.known("gpt-4o") is None
        await given.use("gpt-4o")
        up = given.manager.current
        assert up is not None
        found = [given.manager.known(name) for name in ("gpt-4o", "author/4.0bpw", "4.0bpw", "alpha")]
        assert found == [up, up, up, None]
        assert given.manager.name_of(folder) == "author/4.0bpw"
        scripted.add_model("4.0bpw")  # which is another model
        assert [given.manager.known(name) for name in ("4.0bpw", "author/4.0bpw")] == [None, up]


async def test_the_tag_of_an_alias_may_be_left_out(scripted: ScriptedEngine) -> None:
    async with models(scripted, aliases={"llama3:latest": "alpha", "qwen": "beta"}) as given:
        named = [given.manager.resolve(name).name for name in ("llama3:latest", "llama3", "qwen")]
        assert named == ["alpha", "alpha", "beta"]


@pytest.mark.usefixtures("instant")
async def test_who_does_not_read_the_events_is_dropped(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.model_events.MOST_EVENTS", 3)
    async with models(scripted) as given:
        slow = given.manager.events.follow()
        await given.use("alpha")  # five events
        events = aiter(slow)
        assert [(await anext(events)).state for _ in range(3)] == ["loading"] * 3
        with pytest.raises(ServerBusy, match="not read in time"):
            await anext(events)
        assert not given.manager.events._followers


@pytest.mark.usefixtures("instant")
async def test_events_tell_what_happens(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstantClient, "sizes", {"gamma": 2})
    async with models(scripted, memory_budget=1) as given:
        follower = given.manager.events.follow()
        await given.use("alpha")
        with pytest.raises(InvalidRequest):
            await given.use("gamma")
        await given.use("beta")
        await given.manager.unload()
        await given.manager.stop_loading()
        events = [(event.name, event.state, event.reason) async for event in follower if event.progress is None]
        follower.close()
    reason = events[3][2]
    assert "memory_budget" in str(reason)
    loading = [("alpha", "loading", None), ("alpha", "loaded", None)]
    failing = [("gamma", "loading", None), ("gamma", "failed", reason)]
    swap = [("beta", "loading", None), ("alpha", "unloaded", "displaced"), ("beta", "loaded", None)]
    assert events == [*loading, *failing, *swap, ("beta", "unloaded", "requested")]


@pytest.mark.usefixtures("instant")
async def test_events_tell_of_every_module(scripted: ScriptedEngine) -> None:
    async with models(scripted) as given:
        follower = given.manager.events.follow()
        await given.use("alpha")
        given.manager.events.close()
        progress = [event.progress async for event in follower if event.progress is not None]
        follower.close()
        assert [(record.module, record.modules) for record in progress] == [(1, 2), (2, 2)]
        assert [event async for event in given.manager.events.follow()] == list[ModelEvent]()


def test_a_manager_takes_the_settings_of_the_server() -> None:
    manager = ModelManager(Path("models"), selection=ModelSelection(max_models=3, aliases={"a": "b"}))
    assert manager.aliases == {"a": "b"}
    assert manager.loaded == 0
