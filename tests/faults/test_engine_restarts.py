"""An engine process that dies is started again, until that was tried too often; and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.client import EngineClient
from backends.engine_process import EngineProcess
from common.errors import EngineFailed, ErrorRecord, ModelLoadFailed, ModelNotLoaded
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.faults.leaks import nothing_left_behind
from tests.scripted import ScriptedEngine, say, up
from tests.scripted_worker import ModelScript, Play, Script

DIES = Play(when="die", chunks=["a"], crash_after=1)
PLAYS = [DIES, Play(when="wait", hang_after=0), Play(chunks=["alive"])]
# What an engine says that finds no memory when it starts.
NO_MEMORY = ErrorRecord(code="model_load_failed", message="not enough memory for /srv/models/alpha/model.safetensors")


@pytest.mark.parametrize("crashes", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_an_engine_may_die_any_number_of_times_if_it_was_stable_in_between(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    monkeypatch.setattr("backends.process_client.STABLE_SECONDS", 0.0)
    scripted.write(Script(plays=PLAYS))
    async with nothing_left_behind(), up(scripted.client()) as client:
        async with nothing_left_behind():  # while it serves
            for _ in range(crashes):
                waiting, explaining = asyncio.create_task(say(client, "wait")), asyncio.create_task(client.inspect())
                await explaining
                with pytest.raises(EngineFailed):
                    await say(client, "die")
                with pytest.raises(EngineFailed):
                    await waiting
                assert await say(client) == "alive"
        assert client.state == "ready"
        assert not client._has_work


async def test_the_crash_of_one_engine_is_nothing_to_another(scripted: ScriptedEngine) -> None:
    slow = Play(when="slow", chunks=["x"] * 10, delay=0.1)
    scripted.write(Script(plays=[slow, *PLAYS]))
    async with up(scripted.client("alpha")) as alpha, up(scripted.client("beta")) as beta:
        other = asyncio.create_task(say(beta, "slow"))
        process = beta._process
        with pytest.raises(EngineFailed):
            await say(alpha, "die")
        assert await say(alpha) == "alive"
        assert await other == "x" * 10
        assert beta._process is process


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelLoadFailed("The engine process of alpha cannot be started"), "alpha cannot be started"),
        (RuntimeError("a defect"), "could not be started: RuntimeError"),
    ],
)
async def test_whatever_a_restart_fails_with_is_counted_and_told(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0, 0.01, 0.02))
    scripted.write(Script(plays=PLAYS))
    attempts: list[bool] = []

    async def fail(*arguments: object) -> EngineProcess[object]:
        raise error

    async with up(scripted.client()) as client:
        client.on_restart = attempts.append
        monkeypatch.setattr(EngineProcess, "start", fail)
        with pytest.raises(EngineFailed):
            await say(client, "die")
        with pytest.raises(ModelNotLoaded, match=f"given up after 3 attempts.*{reason}"):
            await say(client)
        assert client.state == "failed"
        assert attempts == [False] * 3


async def test_a_process_that_the_system_does_not_start(scripted: ScriptedEngine) -> None:
    client = EngineClient(scripted.model_dir / "alpha", scripted.client().settings, ("/no/such/program",))
    with pytest.raises(ModelLoadFailed, match="cannot be started: No such file or directory"):
        await client.prepare()
    await client.close()


# --- over HTTP --------------------------------------------------------------------------------------------------------


@contextmanager
def loaded_server(engine: ScriptedEngine, script: Script, **model: object) -> Iterator[RunningServer]:
    engine.write(script)
    with running_server(engine, model=model).running() as server:
        server.load("alpha")
        yield server


def complete(server: RunningServer, prompt: str) -> str:
    answer = server.http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_crash_ends_requests_with_an_error_and_readiness_comes_back(scripted: ScriptedEngine) -> None:
    with loaded_server(scripted, Script(plays=PLAYS)) as server:
        refused = server.http.post("/v1/completions", json={"prompt": "die"})
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_failed"
        stream = server.http.post("/v1/completions", json={"prompt": "die", "stream": True})
        assert server.http.get("/health").status_code == 200
        *_, error, done = [line for line in stream.text.splitlines() if line.startswith("data: ")]
        assert '"code":"engine_failed"' in error
        assert done == "data: [DONE]"
        assert complete(server, "hi") == "alive"
        assert server.http.get("/ready").status_code == 200


def test_an_engine_that_is_given_up_is_reported_until_a_model_is_loaded(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    with loaded_server(scripted, Script(plays=PLAYS)) as server:
        scripted.write(Script(models={"alpha": ModelScript(load_error=NO_MEMORY)}))
        assert server.http.post("/v1/completions", json={"prompt": "die"}).status_code == 500
        eventually(lambda: server.manager.state == "failed")
        assert server.http.get("/health").status_code == 200
        for response in (server.http.get("/ready"), server.http.post("/v1/completions", json={"prompt": "hi"})):
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert "given up after 1 attempts" in error["message"]
            assert "not enough memory for model.safetensors" in error["message"]
        parameters = server.http.get("/v1/model").json()["parameters"]
        assert parameters["engine_state"] == "failed"
        assert "not enough memory" in parameters["engine_failure"]

        scripted.write(Script(plays=PLAYS))
        server.load("alpha")
        assert server.http.get("/ready").status_code == 200
        parameters = server.http.get("/v1/model").json()["parameters"]
        assert (parameters["engine_state"], parameters["engine_failure"]) == ("ready", None)


@pytest.mark.parametrize("name", [None, "alpha"])
def test_where_requests_load_models_they_load_one_that_was_given_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    with loaded_server(scripted, Script(plays=PLAYS), inline_model_loading=True) as server:
        scripted.write(Script(models={"alpha": ModelScript(load_error=NO_MEMORY)}))
        body = {"prompt": "die", "model": name}
        assert server.http.post("/v1/completions", json=body).status_code == 500
        eventually(lambda: server.manager.state == "failed")
        scripted.write(Script(plays=PLAYS))
        response = server.http.post("/v1/completions", json={"prompt": "hi", "model": name})
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "alive")
        assert complete(server, "hi") == "alive"


def test_the_timeout_of_the_engine_is_the_setting(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    with running_server(scripted, network={"engine_timeout": 77}).running() as server:
        server.load("alpha")
        client = server.manager.require()
        assert client._engine_timeout == 77


@pytest.mark.slow
def test_a_hanging_engine_over_http(scripted: ScriptedEngine) -> None:
    scripted.write(Script(plays=[Play(when="block", busy=3600.0), *PLAYS]))
    with running_server(scripted, network={"engine_timeout": 10}).running() as server:
        server.load("alpha")
        refused = server.http.post("/v1/completions", json={"prompt": "block"})
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_hangs"
        assert complete(server, "hi") == "alive"


@pytest.mark.slow
def test_a_load_that_hangs_brings_the_previous_model_back(scripted: ScriptedEngine) -> None:
    scripted.write(Script(plays=PLAYS, models={"beta": ModelScript(load_seconds=3600.0)}))
    with running_server(scripted, network={"engine_timeout": 10}).running() as server:
        server.load("alpha")
        answer = server.admin.post("/v1/model/load", json={"model_name": "beta"})
        assert "reported no progress for 10 s" in answer.text
        assert "The previous model alpha is loaded again" in answer.text
        assert complete(server, "hi") == "alive"
