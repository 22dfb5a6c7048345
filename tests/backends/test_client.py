"""The server side of an engine process, over a real process that plays a script."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from loguru import logger

from backends.messages import LoadProgress
from common.caching import CacheChange
from common.config_models import MemoryConfig
from common.errors import (
    ContextLengthExceeded,
    EngineFailed,
    ErrorRecord,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotLoaded,
    RequestCancelled,
    ServerError,
    Unsupported,
)
from common.generation import Event, Finish, Prefill, TextDelta
from tests.scripted import ScriptedEngine, ask, serving, text_of
from tests.scripted_worker import ModelScript, Play, Script


async def test_load_reports_every_module_and_the_model(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    client = scripted.client(recurrent_checkpoint_interval=1024)
    await client.prepare()
    assert client.state == "prepared"
    progress = [record async for record in client.load()]
    assert progress == [LoadProgress(component="model", module=n, modules=3) for n in (1, 2, 3)]
    assert client.info is not None
    assert client.info.name == "alpha"
    assert client.info.checkpoints is not None
    assert client.info.checkpoints.interval == 1024
    await client.close()


async def test_a_warning_of_a_thread_of_the_engine_is_one_in_the_log(scripted: ScriptedEngine) -> None:
    levels: dict[str, str] = {}
    sink = logger.add(lambda line: levels.update({line.record["message"]: line.record["level"].name}), level="INFO")
    script = Script(models={"alpha": ModelScript(warning="The disk is full.")}, plays=[Play()])
    async with serving(scripted, script) as client:
        assert await text_of(await client.generate(ask())) == "Hello world"
    logger.remove(sink)
    assert levels["[engine alpha] The disk is full."] == "WARNING"


async def test_events_come_in_order_and_end_with_finish(scripted: ScriptedEngine) -> None:
    play = Play(chunks=["a", "b"], prefill=[(1, 2), (2, 2)], cached_tokens=1)
    async with serving(scripted, Script(plays=[play])) as client, await client.generate(ask("hi")) as generation:
        assert await generation.accepted() == 2
        events = [event async for event in generation]
        assert [type(event) for event in events] == [Prefill, Prefill, TextDelta, TextDelta, Finish]
        finish = events[-1]
        assert isinstance(finish, Finish)
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (2, 2, 1)
        assert client.running == 0


async def test_followed_events_are_those_that_an_iteration_gives(scripted: ScriptedEngine) -> None:
    play = Play(chunks=["a", "b"], prefill=[(1, 2), (2, 2)], delay=0.01)
    async with serving(scripted, Script(plays=[play])) as client:
        iterated = [type(event) async for event in await client.generate(ask())]
        for head_start in (0.0, 0.02):  # some may have come before they are followed
            idle = asyncio.Event()
            client.on_idle = idle.set
            generation, followed = await client.generate(ask()), list[Event | ServerError]()
            await asyncio.sleep(head_start)
            generation.follow(followed.append)
            await idle.wait()
            assert [type(event) for event in followed] == iterated
        generation, followed = await client.generate(ask()), []
        generation.follow(followed.append)
        await generation.cancel()
        assert isinstance(followed[-1], RequestCancelled)


async def test_many_requests_at_once_keep_apart(scripted: ScriptedEngine) -> None:
    plays = [Play(when=f"<{n}>", chunks=[str(n)] * 5, delay=0.001) for n in range(20)]
    async with serving(scripted, Script(plays=plays)) as client:
        generations = [await client.generate(ask(f"<{n}>")) for n in range(20)]
        texts = await asyncio.gather(*map(text_of, generations))
        assert texts == [str(n) * 5 for n in range(20)]


async def test_a_refused_request_raises_before_any_event(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(models={"alpha": ModelScript(max_seq_len=10)})) as client:
        generation = await client.generate(ask("x" * 50))
        with pytest.raises(ContextLengthExceeded, match="at most 8 fit"):
            await generation.accepted()
        with pytest.raises(ContextLengthExceeded):
            await text_of(generation)
        assert client.running == 0


async def test_cancel_ends_the_stream_and_frees_the_engine(scripted: ScriptedEngine) -> None:
    plays = [Play(when="slow", chunks=["x"] * 1000, delay=0.01), Play(chunks=["next"])]
    async with serving(scripted, Script(plays=plays)) as client:
        generation = await client.generate(ask("slow"))
        await generation.accepted()
        await generation.cancel()
        await generation.cancel()
        with pytest.raises(RequestCancelled):
            await text_of(generation)
        assert client.running == 0
        assert await text_of(await client.generate(ask("quick"))) == "next"


async def test_leaving_the_block_cancels(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[Play(hang_after=0)])) as client:
        async with await client.generate(ask()) as generation:
            await generation.accepted()
            assert client.running == 1
        assert client.running == 0


async def test_a_failing_request_hurts_no_other(scripted: ScriptedEngine) -> None:
    plays = [Play(when="bad", fail_after=1), Play(when="good", chunks=["fine"] * 3, delay=0.01)]
    async with serving(scripted, Script(plays=plays)) as client:
        good, bad = await client.generate(ask("good")), await client.generate(ask("bad"))
        with pytest.raises(EngineFailed, match="the script says: fail"):
            await text_of(bad)
        assert await text_of(good) == "finefinefine"


async def test_a_crash_fails_what_runs_and_the_engine_comes_back(scripted: ScriptedEngine) -> None:
    plays = [Play(when="die", crash_after=1), Play(when="wait", hang_after=0), Play(chunks=["alive"])]
    restarts: list[bool] = []
    async with serving(scripted, Script(plays=plays)) as client:
        client.on_restart = restarts.append
        waiting = await client.generate(ask("wait"))
        dying = await client.generate(ask("die"))
        for generation in (dying, waiting):
            with pytest.raises(EngineFailed, match="code 23.*the script says: die"):
                await text_of(generation)
        assert await text_of(await client.generate(ask("after"))) == "alive"
        assert client.state == "ready"
        assert restarts == [True]


async def test_an_engine_that_keeps_crashing_is_given_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0, 0.0))
    restarts: list[bool] = []
    async with serving(scripted, Script(plays=[Play(crash_after=0)])) as client:
        client.on_restart = restarts.append
        scripted.write(Script(models={"alpha": ModelScript(load_crash=True)}))
        with pytest.raises(EngineFailed):
            await text_of(await client.generate(ask()))
        with pytest.raises(ModelNotLoaded, match="code 24"):
            await client.generate(ask())
        assert client.state == "failed"
        assert restarts == [False, False]


async def test_close_cancels_what_runs_and_ends_the_process(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[Play(hang_after=0)])) as client:
        generation = await client.generate(ask())
        await generation.accepted()
        process = client._process
        assert process is not None
        await client.close()
        with pytest.raises(RequestCancelled, match="alpha was unloaded"):
            await text_of(generation)
        assert process.returncode == 0
        with pytest.raises(ModelNotLoaded):
            await client.generate(ask())


@pytest.mark.parametrize(
    ("steps", "disk_cache_dir", "killed"),
    [([1.0, 1.0, 1.0], None, False), ([60.0], None, True), ([3.0], "somewhere", False)],
    ids=["gets-on", "says-nothing", "writes-to-disk"],
)
async def test_an_engine_may_take_its_time_to_end_while_it_gets_on(
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[float],
    disk_cache_dir: str | None,
    killed: bool,
) -> None:
    monkeypatch.setattr("backends.process_client.SHUTDOWN_SECONDS", 2.5)
    async with serving(scripted, Script(models={"alpha": ModelScript(unload_steps=steps)})) as client:
        memory = MemoryConfig(disk_cache_dir=disk_cache_dir)
        client.settings = client.settings.model_copy(update={"memory": memory})
        process = client._process
        assert process is not None
        await client.close()
        assert (process.returncode != 0) is killed


async def test_errors_of_prepare_and_load_keep_their_kind(scripted: ScriptedEngine) -> None:
    record = ErrorRecord(code="invalid_request", message="no such thing", param="model.cache_mode")
    scripted.write(Script(models={"alpha": ModelScript(prepare_error=record), "beta": ModelScript(load_crash=True)}))
    alpha, beta = scripted.client("alpha"), scripted.client("beta")
    with pytest.raises(InvalidRequest) as raised:
        await alpha.prepare()
    assert raised.value.param == "model.cache_mode"
    await beta.prepare()
    with pytest.raises(ModelLoadFailed, match="code 24"):
        _ = [record async for record in beta.load()]


async def test_encode_and_decode(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script()) as client:
        assert await client.encode("hé") == [104, 233]
        assert await client.decode([104, 233]) == "hé"


async def test_a_failed_call_raises_its_error(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script()) as client:
        with pytest.raises(InvalidRequest):
            await client.decode([-1])


async def test_the_engine_ends_when_its_pipe_closes(scripted: ScriptedEngine) -> None:
    """As when the server is killed: the engine may be blocked in a long step and must not stay behind."""
    async with serving(scripted, Script(plays=[Play(busy=60)])) as client:
        generation = await client.generate(ask())
        await generation.accepted()
        process = client._process
        assert process is not None
        client.state = "closed"  # a process that ends on its own is not started again
        process.close_input()
        await asyncio.wait_for(process.ended, 10)
        assert process.returncode == 0
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_the_cache_is_inspected_and_cleared(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script()) as client:
        state = await client.inspect()
        assert [tier.tier for tier in state.tiers] == ["vram", "ram"]
        assert state.checkpoints is not None
        assert [entry.position for entry in state.checkpoints.entries] == [512, 256]
        assert await client.clear_cache() == CacheChange(pages=3, checkpoints=2)


async def test_a_prompt_is_explained_without_being_sent(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[Play(cached_tokens=2)])) as client:
        explanation = await client.explain(msgspec.structs.replace(ask("hello"), owner="someone"))
        assert (explanation.prompt_tokens, explanation.resumed_tokens, explanation.processed_tokens) == (5, 2, 3)
        assert explanation.reason == "The script says so to someone."
        with pytest.raises(ContextLengthExceeded):
            await client.explain(ask("x" * 5000))
    assert scripted.history() == []


async def test_flushing_the_cache_needs_a_tier_on_disk(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script()) as client:
        with pytest.raises(Unsupported, match=r"memory\.disk_cache_dir"):
            await client.flush_cache()


async def test_other_calls_are_answered_while_the_cache_is_flushed(scripted: ScriptedEngine) -> None:
    scripted.write(Script(models={"alpha": ModelScript(flush_seconds=3600.0)}))
    client = scripted.client()
    client.settings = client.settings.model_copy(update={"memory": MemoryConfig(disk_cache_dir="somewhere")})
    await client.prepare()
    async for _ in client.load():
        pass
    flushing = asyncio.create_task(client.flush_cache())
    assert await client.decode(await client.encode("hi")) == "hi"
    assert await text_of(await client.generate(ask())) == "Hello world"
    assert not flushing.done()
    await client.close()
    with pytest.raises(RequestCancelled):
        await flushing
