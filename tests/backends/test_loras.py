"""Exchanging adapters on the server side of an engine process."""

from __future__ import annotations

import asyncio

import pytest

from backends.client import EngineClient
from backends.messages import Lora
from common.config_models import LoraInstance
from common.errors import EngineFailed, RequestCancelled
from tests.scripted import ScriptedEngine, ask, say, serving, text_of
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
