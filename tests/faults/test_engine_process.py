"""An engine process that breaks the protocol, floods its pipes, or hangs.

It is replaced where it cannot be trusted, and what it does reaches nobody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backends import messages
from backends.client import EngineClient
from backends.printed import LINES_PER_SECOND
from common.errors import EngineFailed, EngineHangs, ModelLoadFailed, RequestCancelled, RequestTooLarge
from tests.faults.leaks import nothing_left_behind
from tests.scripted import ScriptedEngine, ask, load_settings, say, serving, text_of, up
from tests.scripted_worker import ModelScript, Play, Script

TIMEOUT = 0.8


@asynccontextmanager
async def rogue(engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    command = (sys.executable, "-m", "tests.faults.rogue_worker", str(engine.script_path))
    async with up(EngineClient(engine.model_dir / "alpha", load_settings(), command)) as client:
        yield client


def watch(client: EngineClient) -> asyncio.Task[None]:
    """The watchdog, with less patience than a process that starts can do with."""
    assert client._process is not None
    return asyncio.create_task(client._process.end_when_hanging(lambda: client._has_work, TIMEOUT))


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("garbage", "sent what cannot be read"),
        pytest.param("length", "sent what cannot be read", marks=pytest.mark.slow),
        pytest.param("unknown load", "sent what cannot be read", marks=pytest.mark.slow),
        pytest.param("close", "closed its pipe", marks=pytest.mark.slow),
        ("orphan", "ended with code 5"),
    ],
)
async def test_a_process_that_breaks_the_protocol_is_replaced(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    monkeypatch.setattr("backends.engine_process.LINGER_SECONDS", 2.0)
    async with nothing_left_behind(), rogue(scripted) as client:
        with pytest.raises(EngineFailed, match=message):
            await say(client, how)
        assert await say(client, "hi") == "Hello"


@pytest.mark.skipif(os.name == "nt", reason="forks")
async def test_what_an_engine_leaves_behind_holds_nobody_up(scripted: ScriptedEngine, log_lines: list[str]) -> None:
    async with nothing_left_behind(), rogue(scripted) as client:
        requests = [asyncio.create_task(say(client, prompt)) for prompt in ("fork", "x" * 1_000_000)]
        for request in requests:
            with pytest.raises(EngineFailed, match="ended with code 5"):
                await request
        printed = next(line for line in log_lines if "left behind: " in line)
        left_behind = int(printed.rpartition(" ")[2])
        os.kill(left_behind, 0)  # which still lives
        assert await say(client, "hi") == "Hello"
    os.kill(left_behind, signal.SIGKILL)


async def test_messages_that_nobody_waits_for_are_dropped(scripted: ScriptedEngine) -> None:
    async with rogue(scripted) as client:
        assert await say(client, "strangers") == "Hello"
        assert await say(client, "echo") == "Hello"
        with pytest.raises(EngineFailed, match="Decoded where Encoded"):
            await client.encode("hi")
        assert await say(client, "hi") == "Hello"
        assert client.state == "ready"


async def test_a_flood_of_printed_text_is_cut(scripted: ScriptedEngine, log_lines: list[str]) -> None:
    async with rogue(scripted) as client:
        assert await say(client, "flood") == "Hello"
        while not any("too fast for the log" in line for line in log_lines):
            await say(client, "hi")
            await asyncio.sleep(0.05)
    printed = [line for line in log_lines if line.startswith("[engine alpha] ")]
    assert max(map(len, printed)) < 3000
    assert any("xxxx" in line for line in printed)
    assert len(printed) < 5 * LINES_PER_SECOND


def test_no_text_is_the_beginning_of_a_frame() -> None:
    for text in (b"    ", b"Trac", b"\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match="not the beginning of a frame"):
            messages.body_length(text)
    assert messages.body_length(messages.MAX_FRAME_BYTES.to_bytes(4, "big")) == messages.MAX_FRAME_BYTES


async def test_a_request_that_no_frame_holds_is_refused_alone(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(scripted, Script()) as client:
        monkeypatch.setattr("backends.messages.MAX_FRAME_BYTES", 1 << 20)
        for send in (client.generate(ask("x" * (2 << 20))), client.encode("x" * (2 << 20))):
            with pytest.raises(RequestTooLarge, match="takes 2 MB on its way to the engine, which takes 1 at most"):
                await send
        assert client.running == 0
        assert not client._has_work
        assert await say(client, "hi") == "Hello world"


# --- hanging ----------------------------------------------------------------------------------------------------------


async def test_an_engine_that_hangs_is_ended_and_comes_back(scripted: ScriptedEngine) -> None:
    script = Script(plays=[Play(when="hang", chunks=["a"], hang_after=1), Play(when="block", busy=3600.0), Play()])
    async with nothing_left_behind(), serving(scripted, script) as client:
        for prompt in ("hang", "block"):
            watchdog = watch(client)
            hanging = await client.generate(ask(prompt))
            await hanging.accepted()
            waiting = asyncio.create_task(client.encode("hi"))
            with pytest.raises(EngineHangs, match=r"no progress for 0.8 s \(network.engine_timeout\)"):
                await text_of(hanging)
            if prompt == "block":
                with pytest.raises(EngineHangs):
                    await waiting
            await watchdog
            assert await say(client, "hi") == "Hello world"
        assert client.state == "ready"


async def test_an_engine_hangs_also_where_nobody_waits_any_more(scripted: ScriptedEngine) -> None:
    """A client that times out before the watchdog asks again, over and over, must not keep a hanging engine alive."""
    async with serving(scripted, Script(plays=[Play(when="block", busy=3600.0)])) as client:
        process = client._process
        assert process is not None
        watch(client)
        async with await client.generate(ask("block")) as generation:
            await generation.accepted()
        await asyncio.wait_for(process.ended, 60)
        assert await say(client, "hi") == "Hello world"


async def test_a_slow_engine_is_not_a_hanging_one(scripted: ScriptedEngine) -> None:
    slow = Play(when="slow", prefill=[(1, 3), (2, 3), (3, 3)], chunks=["a", "b", "c"], delay=TIMEOUT * 0.4)
    async with serving(scripted, Script(plays=[slow, Play()])) as client:
        watchdog = watch(client)
        assert await say(client, "slow") == "abc"
        await asyncio.sleep(TIMEOUT * 1.5)  # one without work may say nothing
        assert not watchdog.done()
        assert not client._has_work
        watchdog.cancel()


@pytest.mark.slow
async def test_a_load_that_hangs_ends(scripted: ScriptedEngine) -> None:
    scripted.write(Script(models={"alpha": ModelScript(load_seconds=3600.0), "beta": ModelScript(load_seconds=30.0)}))
    alpha, beta = scripted.client("alpha", engine_timeout=15.0), scripted.client("beta", engine_timeout=15.0)
    async with nothing_left_behind():
        await asyncio.gather(alpha.prepare(), beta.prepare())
        with pytest.raises(ModelLoadFailed, match="ended while it loaded alpha: .* no progress for 15 s"):
            _ = [progress async for progress in alpha.load()]
        await alpha.close()
        assert len([progress async for progress in beta.load()]) == 3
        await beta.close()


# --- ended by others --------------------------------------------------------------------------------------------------


async def test_a_process_that_is_killed_says_who_may_have_done_it(scripted: ScriptedEngine) -> None:
    async with serving(scripted, Script(plays=[Play(when="wait", hang_after=0)])) as client:
        generation = await client.generate(ask("wait"))
        await generation.accepted()
        process = client._process
        assert process is not None
        process.kill()
        with pytest.raises(EngineFailed, match="was killed from outside .* when memory runs out.*cache_size"):
            await text_of(generation)


async def test_a_process_that_ends_before_it_is_told_to_load(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    client = scripted.client()
    await client.prepare()
    process = client._process
    assert process is not None
    process.kill()
    await process.ended
    with pytest.raises(ModelLoadFailed, match="ended while it loaded alpha"):
        _ = [progress async for progress in client.load()]
    await client.close()


async def test_a_process_that_cannot_be_killed_is_given_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a driver that does not answer."""
    monkeypatch.setattr("backends.engine_process.KILL_SECONDS", 0.2)
    async with nothing_left_behind(), serving(scripted, Script(plays=[Play(when="wait", hang_after=0)])) as client:
        generation = await client.generate(ask("wait"))
        process = client._process
        assert process is not None
        monkeypatch.setattr(process._process, "kill", lambda: None)
        process.kill(EngineHangs("It hangs."))
        with pytest.raises(EngineHangs):
            await text_of(generation)
        assert await say(client, "hi") == "Hello world"


async def test_a_forced_close_waits_for_nothing(scripted: ScriptedEngine) -> None:
    script = Script(models={"alpha": ModelScript(unload_steps=[3600.0])}, plays=[Play(hang_after=0)])
    async with serving(scripted, script) as client:
        generation = await client.generate(ask())
        await generation.accepted()
        process = client._process
        assert process is not None
        in_order = asyncio.create_task(client.close())
        await asyncio.sleep(0.1)
        assert not in_order.done()
        await client.close(force=True)
        await in_order
        with pytest.raises(RequestCancelled):
            await text_of(generation)
        assert process.returncode == -9
