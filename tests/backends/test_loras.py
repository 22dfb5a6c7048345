"""Exchanging adapters on the server side of an engine process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from backends.client import EngineClient
from backends.messages import Lora
from common.config_models import LoraInstance
from common.errors import EngineFailed, ModelNotLoaded, RequestCancelled, Unsupported
from common.generation import GenerationRequest
from common.sampling import SamplingParameters
from tests.adapters import make_adapter
from tests.scripted import ScriptedEngine, ask, load_settings, say, serving, text_of, up
from tests.scripted_worker import ModelScript, Play, Script

SLOW = Play(when="SLOW", chunks=["a", "b", "c"], delay=0.1)
HANG = Play(when="HANG", hang_after=0)


def applied(client: EngineClient) -> list[Lora]:
    assert client.info is not None
    return client.info.loras


async def test_adapters_are_added_rescaled_and_taken_off(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script()) as client:
        await client.add_loras([Lora("a", 1.0), Lora("b", 1.0)])
        await client.add_loras([Lora("a", 0.5), Lora("c", 1.0)])
        assert applied(client) == [Lora("b", 1.0), Lora("a", 0.5), Lora("c", 1.0)]
        assert client.settings.lora.loras[1] == LoraInstance(name="a", scaling=0.5)
        await client.remove_loras()
        assert applied(client) == []


async def test_a_change_waits_for_requests_and_later_requests_wait_for_it(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[SLOW])) as client:
        running = await client.generate(ask("SLOW"))
        change = asyncio.create_task(client.add_loras([Lora("a", 1.0)]))
        await asyncio.sleep(0)
        later = asyncio.create_task(client.generate(ask("later")))
        assert await text_of(running) == "abc"
        assert not later.done()
        generation = await later
        assert applied(client) == [Lora("a", 1.0)]
        assert await text_of(generation) == "Hello world"
        await change


async def test_requests_in_flight_can_be_cancelled_for_a_change(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[HANG])) as client:
        running = await client.generate(ask("HANG"))
        await client.add_loras([Lora("a", 1.0)], skip_queue=True)
        with pytest.raises(RequestCancelled, match="adapters were exchanged"):
            await text_of(running)
        assert await say(client) == "Hello world"


async def test_a_change_goes_on_when_its_caller_has_gone(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[SLOW])) as client:
        running = await client.generate(ask("SLOW"))
        change = asyncio.create_task(client.add_loras([Lora("a", 1.0)]))
        await asyncio.sleep(0)
        change.cancel()
        assert await text_of(running) == "abc"
        assert await say(client) == "Hello world"  # which has waited
        assert applied(client) == [Lora("a", 1.0)]


async def test_adapters_come_back_with_an_engine_that_has_died(scripted: ScriptedEngine) -> None:
    script = Script(plays=[Play(when="CRASH", crash_after=0)], models={"alpha": ModelScript(refused_loras={"z": "no"})})
    async with serving(scripted, script) as client:
        await client.add_loras([Lora("a", 0.5)])
        with pytest.raises(EngineFailed):
            await say(client, "CRASH")
        assert await say(client) == "Hello world"
        assert applied(client) == [Lora("a", 0.5)]
        problems = await client.check_loras([Lora("z", 1.0), Lora("a", 1.0)])
        assert [problem and problem.message for problem in problems] == ["no", None]


async def test_an_adapter_that_is_gone_does_not_keep_the_model_from_coming_back(
    scripted: ScriptedEngine, log_lines: list[str]
) -> None:
    crash, gone = (
        Play(when="CRASH", crash_after=0),
        {"alpha": ModelScript(refused_loras={"b": "There is no adapter b."})},
    )

    async def crashed(client: EngineClient) -> None:
        with pytest.raises(EngineFailed):
            await say(client, "CRASH")
        assert await say(client) == "Hello world"

    async with serving(scripted, Script(plays=[crash])) as client:
        await client.add_loras([Lora("a", 0.5), Lora("b", 1.0), Lora("c", 1.0)])
        scripted.write(Script(plays=[crash], models=gone))
        await crashed(client)
        assert applied(client) == [Lora("a", 0.5), Lora("c", 1.0)]
        assert client.left_out == {"b": "There is no adapter b."}
        assert client.info is not None
        (warning,) = client.info.warnings
        assert "without the adapter b" in warning
        assert [line for line in log_lines if "without the adapter b" in line] == [f"alpha: {warning}"]
        scripted.write(Script(plays=[crash]))
        await crashed(client)  # and the adapter is there again
        assert applied(client) == [Lora("a", 0.5), Lora("b", 1.0), Lora("c", 1.0)]
        assert (client.left_out, client.info.warnings) == ({}, [])


async def test_a_change_of_adapters_settles_which_are_left_out(scripted: ScriptedEngine) -> None:
    gone = {"alpha": ModelScript(refused_loras={"a": "It is gone."})}
    async with serving(scripted, Script(plays=[Play(when="CRASH", crash_after=0)])) as client:
        await client.add_loras([Lora("a", 1.0)])
        scripted.write(Script(models=gone))
        with pytest.raises(EngineFailed):
            await say(client, "CRASH")
        assert await say(client) == "Hello world"
        with pytest.raises(Unsupported, match="It is gone"):
            await client.add_loras([Lora("a", 1.0)])
        assert client.left_out == {"a": "It is gone."}
        await client.remove_loras()
        assert client.info is not None
        assert (client.left_out, client.info.warnings, client.settings.lora.loras) == ({}, [], [])


async def test_an_engine_that_dies_of_an_adapter_is_given_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    async with serving(scripted, Script(plays=[Play(when="CRASH", crash_after=0)])) as client:
        await client.add_loras([Lora("a", 1.0)])
        scripted.write(Script(models={"alpha": ModelScript(lora_crash=True)}))
        with pytest.raises(EngineFailed):
            await say(client, "CRASH")
        with pytest.raises(ModelNotLoaded, match="ended with code 25"):
            await say(client)
        assert client.state == "failed"


async def test_adapters_of_the_first_load_have_to_fit(scripted: ScriptedEngine) -> None:
    scripted.write(Script(models={"alpha": ModelScript(refused_loras={"a": "It does not fit."})}))
    for was_up in (False, True):  # as of a model that was put to sleep with them
        client = scripted.client()
        lora = client.settings.lora.model_copy(update={"loras": [LoraInstance(name="a")]})
        settings = client.settings.model_copy(update={"lora": lora})
        client = EngineClient(client.directory, settings, scripted.command, was_up=was_up)
        if was_up:
            async with up(client):
                assert client.left_out == {"a": "It does not fit."}
        else:
            with pytest.raises(Unsupported, match="It does not fit"):
                await client.prepare()


async def test_an_engine_that_dies_during_a_change_comes_back_as_it_was(scripted: ScriptedEngine) -> None:
    crash = Play(when="CRASH", chunks=["x"], delay=0.1, crash_after=1)
    async with serving(scripted, Script(plays=[crash])) as client:
        await client.add_loras([Lora("a", 1.0)])
        running = await client.generate(ask("CRASH"))
        with pytest.raises(EngineFailed):
            await client.add_loras([Lora("b", 1.0)])
        with pytest.raises(EngineFailed):
            await text_of(running)
        assert await say(client) == "Hello world"
        assert applied(client) == [Lora("a", 1.0)]


@pytest.mark.slow
async def test_the_real_engine_comes_back_without_an_adapter_whose_folder_is_gone(
    tiny_llama: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "loras" / "poet", tiny_llama)
    settings = load_settings(cache_size=1024, max_seq_len=1024)
    lora = settings.lora.model_copy(update={"lora_dir": str(adapter.parent)})
    asked = GenerationRequest(prompt="def f(x):\n" * 40, sampling=SamplingParameters(temperature=0), max_tokens=8)

    async def told(client: EngineClient) -> str:
        return await text_of(await client.generate(asked))

    async def killed(client: EngineClient) -> None:
        process = client._process
        assert process is not None
        process.kill()
        while client.state == "ready":
            await asyncio.sleep(0.01)

    async with up(EngineClient(tiny_llama, settings.model_copy(update={"lora": lora}))) as client:
        plain = await told(client)
        await client.add_loras([Lora("poet", 1.0)])
        with_adapter = await told(client)
        assert with_adapter != plain
        adapter.rename(tmp_path / "poet")
        await killed(client)
        assert await told(client) == plain
        assert "There is no adapter" in client.left_out["poet"]
        (tmp_path / "poet").rename(adapter)
        await killed(client)
        assert await told(client) == with_adapter
        assert client.left_out == {}
