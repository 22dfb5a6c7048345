"""Load, swap, roll back, unload: over real processes that play a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.manager import ModelManager
from backends.messages import LoadProgress
from common.errors import ErrorRecord, InvalidRequest, ModelLoadFailed, ModelNotFound, ModelNotLoaded, RequestCancelled
from tests.scripted import ScriptedEngine, ask, load_settings
from tests.scripted import say as scripted_say
from tests.scripted_worker import ModelScript, Play, Script

REFUSED = ErrorRecord(code="invalid_request", message="cannot be", param=None)
BROKEN = ErrorRecord(code="model_load_failed", message="out of memory", param=None)


@asynccontextmanager
async def managing(engine: ScriptedEngine, script: Script) -> AsyncIterator[ModelManager]:
    engine.write(script)
    manager = engine.manager()
    try:
        yield manager
    finally:
        await manager.close()


async def load(manager: ModelManager, name: str, **model: object) -> list[LoadProgress]:
    directory = manager.resolve(name)
    return [record async for record in manager.load(directory, load_settings(**model))]


async def say(manager: ModelManager, prompt: str = "hi") -> str:
    return await scripted_say(manager.require(), prompt)


async def test_nothing_is_loaded_at_first(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script()) as manager:
        assert manager.state == "empty"
        with pytest.raises(ModelNotLoaded, match="No model is loaded"):
            manager.require()


async def test_a_loaded_model_answers(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script()) as manager:
        assert len(await load(manager, "alpha")) == 3
        assert manager.state == "ready"
        assert await say(manager) == "Hello world"


async def test_a_refused_load_does_not_touch_the_model_that_serves(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(models={"beta": ModelScript(prepare_error=REFUSED)})) as manager:
        await load(manager, "alpha")
        serving = manager.require()
        with pytest.raises(InvalidRequest, match="cannot be"):
            await load(manager, "beta")
        assert manager.require() is serving
        assert await say(manager) == "Hello world"
        assert manager.load_error == "cannot be"


async def test_a_failed_load_brings_the_previous_model_back(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(models={"beta": ModelScript(load_error=BROKEN)})) as manager:
        await load(manager, "alpha", max_seq_len=1000)
        with pytest.raises(ModelLoadFailed, match=r"out of memory\. The previous model alpha is loaded again"):
            await load(manager, "beta")
        info = manager.require().info
        assert info is not None
        assert (info.name, info.max_seq_len) == ("alpha", 1000)
        assert await say(manager) == "Hello world"


async def test_a_failed_first_load_leaves_a_reason(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(models={"beta": ModelScript(load_crash=True)})) as manager:
        with pytest.raises(ModelLoadFailed):
            await load(manager, "beta")
        assert manager.state == "failed"
        with pytest.raises(ModelNotLoaded, match="the last load failed.*code 24"):
            manager.require()


async def test_the_same_model_with_equal_settings_is_answered_at_once(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script()) as manager:
        await load(manager, "alpha", max_seq_len=1000)
        serving = manager.require()
        assert await load(manager, "alpha", max_seq_len=1000) == [LoadProgress(component="model", module=1, modules=1)]
        assert manager.require() is serving
        await load(manager, "alpha", max_seq_len=1001)
        assert manager.require() is not serving


async def test_a_swap_waits_for_what_runs_and_takes_nothing_new(scripted: ScriptedEngine) -> None:
    slow = Play(when="slow", chunks=["x"] * 20, delay=0.05)
    async with managing(scripted, Script(plays=[slow])) as manager:
        await load(manager, "alpha")
        running = asyncio.create_task(say(manager, "slow"))
        while not manager.require().running:
            await asyncio.sleep(0.01)
        swap = asyncio.create_task(load(manager, "beta"))
        while manager.current is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(ModelNotLoaded, match="beta is being loaded"):
            manager.require()
        assert await running == "x" * 20
        await swap
        assert manager.require().name == "beta"


async def test_a_model_goes_on_whose_successor_dies_while_it_finishes(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(plays=[Play(when="wait", hang_after=0)])) as manager:
        await load(manager, "alpha")
        serving = manager.require()
        last = await serving.generate(ask("wait"))
        swap = asyncio.create_task(load(manager, "beta"))
        while manager.current is not None:
            await asyncio.sleep(0.01)
        [successor] = manager._clients - {serving}
        assert successor._process is not None
        successor._process.kill()
        while successor._process is not None:
            await asyncio.sleep(0.01)
        await last.cancel()
        with pytest.raises(ModelLoadFailed, match="ended while it loaded beta"):
            await swap
        assert manager.require() is serving
        assert await say(manager) == "Hello world"


async def test_skip_queue_cancels_what_runs(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(plays=[Play(hang_after=1)])) as manager:
        await load(manager, "alpha")
        generation = await manager.require().generate(ask())
        await generation.accepted()
        _ = [r async for r in manager.load(manager.resolve("beta"), load_settings(), skip_queue=True)]
        with pytest.raises(RequestCancelled):
            _ = [event async for event in generation]


async def test_a_load_goes_on_when_nobody_watches(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(models={"alpha": ModelScript(load_seconds=0.3)})) as manager:
        async for _ in manager.load(manager.resolve("alpha"), load_settings()):
            break
        while manager.state == "loading":
            await asyncio.sleep(0.02)
        assert manager.state == "ready"


async def test_unload_leaves_nothing(scripted: ScriptedEngine) -> None:
    async with managing(scripted, Script(plays=[Play(hang_after=0)])) as manager:
        await load(manager, "alpha")
        generation = await manager.require().generate(ask())
        await generation.accepted()
        await manager.unload()
        assert manager.state == "empty"
        with pytest.raises(RequestCancelled):
            _ = [event async for event in generation]


@pytest.mark.parametrize("name", ["", " ", "../models/alpha", "/etc", "a/../../b", "x\0y"])
async def test_names_cannot_leave_the_model_directory(scripted: ScriptedEngine, name: str) -> None:
    with pytest.raises(InvalidRequest):
        scripted.manager().resolve(name)


async def test_only_folders_with_a_config_are_models(scripted: ScriptedEngine) -> None:
    (scripted.model_dir / "empty").mkdir()
    (scripted.model_dir / "nested" / "4.0bpw").mkdir(parents=True)
    (scripted.model_dir / "nested" / "4.0bpw" / "config.json").write_text("{}")
    manager = scripted.manager()
    assert manager.list_models() == ["alpha", "beta"]
    assert manager.resolve("nested/4.0bpw") == scripted.model_dir / "nested" / "4.0bpw"
    with pytest.raises(ModelNotFound):
        manager.resolve("empty")
    assert ModelManager(Path("does-not-exist")).list_models() == []
