"""Several models over HTTP: which one a name means, what the lists say, sleep, and what is told of loads."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from common.errors import ErrorRecord
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.serving import served

ALIASES = {"gpt-4o": "beta", "lost": "none-such"}
DUMMY = "gpt-3.5-turbo"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Loads what requests name, two models at once; "alpha" was loaded by an administrator."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("several"))
    for name in ("alpha", "beta", "gamma", "broken"):
        engine.add_model(name)
    write_defaults(engine, "beta", "model: {max_seq_len: 1000, prompt_template: alpaca}")
    write_defaults(engine, "broken", "model: {prompt_template: none-such}")
    engine.write(Script(plays=[Play(when="HANG", hang_after=0)]))
    model = {
        "inline_model_loading": True,
        "max_models": 2,
        "aliases": ALIASES,
        "use_dummy_models": True,
        "use_as_default": ["chunk_size"],
        "chunk_size": 512,
    }
    with running_server(engine, model=model).running() as running:
        running.load("alpha")
        yield running


def write_defaults(engine: ScriptedEngine, name: str, text: str) -> None:
    (engine.model_dir / name / "tabby_config.yml").write_text(text, encoding="utf-8")


def chat(server: RunningServer, text: str = "hi", **fields: object) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})


def model_of(server: RunningServer, **fields: object) -> str:
    """Name of the model that answers."""
    response = chat(server, "hi", **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["model"])


def cards(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {card["id"]: card["status"] for card in client.get("/v1/models").json()["data"]}


def states(client: httpx.Client) -> dict[str, str]:
    return {name: status["value"] for name, status in cards(client).items()}


# --- names --------------------------------------------------------------------------------------------------------


def test_a_request_has_the_model_loaded_that_it_names(server: RunningServer) -> None:
    assert [model_of(server), model_of(server, model=None), model_of(server, model="")] == ["alpha"] * 3
    assert [model_of(server, model=name) for name in ("beta", "gpt-4o", "alpha", DUMMY)] == [
        "beta", "beta", "alpha", "alpha",
    ]  # fmt: skip
    parameters = server.http.get("/v1/model", params={"name": "gpt-4o"}).json()["parameters"]
    assert (parameters["max_seq_len"], parameters["prompt_template"]) == (1000, "alpaca")
    loaded = server.manager.known("beta")
    assert loaded is not None
    assert loaded.settings.model.chunk_size == 512
    assert chat(server, model="beta").json()["usage"]["prompt_tokens"] == len(server.engine.history()[-1].prompt)
    assert "### Instruction" in str(server.engine.history()[-1].prompt)
    model_of(server, model="alpha")
    assert "<|im_start|>" in str(server.engine.history()[-1].prompt)


@pytest.mark.parametrize("name", ["none-such", "lost", "../alpha", "x" * 5000, "alpha/", " "])
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_that_is_no_model_is_refused(server: RunningServer, name: str, stream: bool) -> None:
    response = chat(server, model=name, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_a_model_whose_own_settings_are_broken_is_told_so(server: RunningServer) -> None:
    response = chat(server, model="broken")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert "none-such" in response.json()["error"]["message"]
    assert model_of(server) == "alpha"


def test_tokens_are_those_of_the_model_that_is_named(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for name, written in (("beta", "### Instruction"), ("alpha", "<|im_start|>")):
        body = {"messages": messages, "model": name}
        assert written in server.http.post("/apply-template", json=body).json()["prompt"]
        assert server.http.get("/v1/cache", params={"model": name}).json()["model"] == name
    assert server.http.post("/v1/token/decode", json={"tokens": [1], "model": "none-such"}).status_code == 404


# --- what there is ------------------------------------------------------------------------------------------------


def test_lists_say_how_it_is_with_each_model(server: RunningServer) -> None:
    model_of(server, model="beta")
    seen = cards(server.http)
    assert list(seen)[:3] == [DUMMY, "alpha", "beta"]
    assert {name: status["value"] for name, status in seen.items()} == {
        DUMMY: "loaded",
        "alpha": "loaded",
        "beta": "loaded",
        "broken": "unloaded",
        "gamma": "unloaded",
        "gpt-4o": "loaded",
    }
    assert seen["alpha"] == {
        "value": "loaded", "reason": None, "requests": 0, "memory_bytes": 0, "unloaded_in": None,
    }  # fmt: skip
    assert list(cards(server.admin)) == list(seen)
    assert server.http.get("/v1/models/gpt-4o").json()["status"]["value"] == "loaded"
    assert server.http.get("/v1/models/none-such").status_code == 404
    assert server.http.get("/v1/model").json()["status"]["value"] == "loaded"
    assert server.http.get("/v1/model", params={"name": "gamma"}).status_code == 404


def test_a_model_in_use_stays_and_is_shown_to_be(server: RunningServer) -> None:
    model_of(server, model="beta")
    thread = threading.Thread(target=chat, args=(server, "HANG"), kwargs={"model": "alpha"})
    thread.start()
    eventually(lambda: cards(server.http)["alpha"]["requests"] == 1)
    assert model_of(server, model="gamma") == "gamma"
    assert states(server.http)["beta"] == "unloaded"
    metrics = server.http.get("/metrics").text
    assert "waypoint_models_loaded 2.0" in metrics
    assert 'waypoint_model_unloads_total{reason="displaced"}' in metrics
    for name, status in (("alpha", 200), ("none-such", 404), ("alpha", 404)):
        assert server.admin.post("/v1/model/unload", json={"model_name": name}).status_code == status
    thread.join(30)
    assert states(server.http)["alpha"] == "unloaded"
    server.load("alpha")


def test_without_inline_loading_a_name_only_picks_among_the_loaded(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    with running_server(scripted, model={"max_models": 2, "aliases": {"gpt-4o": "beta"}}).running() as server:
        server.load("beta")
        assert [model_of(server, model=name) for name in ("alpha", "gpt-4o", "none-such")] == ["beta"] * 3
        assert (list(states(server.http)), list(states(server.admin))) == (
            ["beta", "gpt-4o"], ["beta", "alpha", "gpt-4o"],
        )  # fmt: skip
        server.load("alpha")
        assert [model_of(server, model=name) for name in ("beta", "gpt-4o", "none-such")] == ["beta", "beta", "alpha"]


def test_names_that_could_be_those_of_two_models(scripted: ScriptedEngine) -> None:
    for name in ("author/4.0bpw", "4.0bpw"):
        scripted.add_model(name)
    scripted.write(Script())
    model = {
        "inline_model_loading": True,
        "max_models": 4,
        "aliases": {"alpha": "beta", "small:latest": "author/4.0bpw"},
        "use_dummy_models": True,
        "dummy_model_names": ["any:latest"],
    }
    with running_server(scripted, model=model, network={"api_servers": ["oai", "ollama"]}).running() as server:
        assert model_of(server, model="alpha") == "beta"  # an alias comes before a folder
        assert states(server.http)["alpha"] == "loaded"
        server.http.post("/api/generate", json={"model": "small"})
        known = states(server.http)
        # The last part of a path is a name only where it is not that of a folder.
        assert {name: known[name] for name in ("author/4.0bpw", "4.0bpw")} == {
            "author/4.0bpw": "loaded", "4.0bpw": "unloaded",
        }  # fmt: skip
        model_of(server, model="4.0bpw")
        assert server.manager.loaded == 3
        assert model_of(server, model="any") == model_of(server, model="any:latest") == "4.0bpw"
        shown = server.http.post("/api/show", json={"model": "small:latest"})
        assert shown.status_code == 200
        up = server.http.get("/api/ps").json()["models"]
        assert {each["name"] for each in up} == {"beta:latest", "author/4.0bpw:latest", "4.0bpw:latest"}
        server.http.post("/api/generate", json={"model": "small", "keep_alive": 0})
        eventually(lambda: states(server.http)["author/4.0bpw"] == "sleeping")
        assert server.manager.loaded == 2
        chosen = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "keep_alive": 1e300}
        assert server.http.post("/api/chat", json=chosen).status_code == 200
        assert server.http.get("/api/ps").status_code == 200


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_stream_shows_life_while_its_model_is_loaded(scripted: ScriptedEngine) -> None:
    torn = ModelScript(load_seconds=1.5, load_error=ErrorRecord(code="model_load_failed", message="torn"))
    scripted.write(Script(models={"beta": ModelScript(load_seconds=2.5), "alpha": torn}))
    model = {"inline_model_loading": True, "model_dir": str(scripted.model_dir)}
    with running_server(scripted, model=model).running() as server:
        ready = server.anonymous.get("/ready")
        assert (ready.status_code, ready.json()["model"]) == (200, None)
        body = {"messages": [{"role": "user", "content": "hi"}], "model": "beta", "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[0].startswith(": ping")
        assert lines[-1] == "data: [DONE]"
        assert any('"model":"beta"' in line for line in lines)
        # One that fails is told in the stream that has begun, which ends in order; and what was there is back.
        with server.http.stream("POST", "/v1/chat/completions", json=body | {"model": "alpha"}) as response:
            told, done = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert (response.status_code, done) == (200, "data: [DONE]")
        error = json.loads(told.removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == (
            "model_load_failed", "torn. The previous model beta is loaded again.",
        )  # fmt: skip
        assert states(server.http) == {"beta": "loaded", "alpha": "failed"}


@pytest.mark.slow
def test_models_are_swapped_for_many_who_may_leave(scripted: ScriptedEngine) -> None:
    names = [scripted.add_model(name).name for name in ("gamma", "delta")] + ["alpha", "beta"]
    plays = [Play(when="SLOW", chunks=["a", "b", "c"], delay=0.02)]
    scripted.write(Script(plays=plays, models={name: ModelScript(load_seconds=0.05) for name in names}))
    network = {"api_servers": ["oai", "ollama"]}
    model = {"inline_model_loading": True, "max_models": 2}
    with running_server(scripted, model=model, network=network).running() as server:

        def client(seed: int) -> None:
            random = Random(seed)
            for _ in range(8):
                name = random.choice(names)
                body = {"messages": [{"role": "user", "content": "SLOW"}], "model": name, "stream": True}
                lines: list[str] = []
                with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    for line in response.iter_lines():
                        lines.append(line)
                        if random.random() < 0.03:
                            break  # and the connection is closed
                    else:
                        assert lines[-2:] == ["data: [DONE]", ""]
                        assert "".join(lines).count('"content":"') >= 3
                data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert {each["model"] for each in data} <= {name}
                if random.random() < 0.2:
                    server.http.post("/api/generate", json={"model": random.choice(names), "keep_alive": 0})

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(client, range(6)))
        eventually(lambda: all(status["requests"] == 0 for status in cards(server.http).values()))
        assert server.manager.loaded <= 2
        assert server.manager._waiters == []


def test_a_model_sleeps_and_a_request_wakes_it(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    with running_server(scripted, model={"idle_timeout": 1}).running() as server:
        server.load("alpha", max_seq_len=1000)
        status = cards(server.http)["alpha"]
        assert 0 <= status["unloaded_in"] <= 1
        eventually(lambda: states(server.http) == {"alpha": "sleeping"})
        assert server.anonymous.get("/ready").json() == {"status": "ready", "model": "alpha"}
        card = server.http.get("/v1/model").json()
        assert (card["status"]["value"], card["parameters"]["max_seq_len"]) == ("sleeping", 1000)
        assert server.http.get("/props").json()["default_generation_settings"]["n_ctx"] == 1000
        response = server.http.get("/v1/cache")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_loaded")
        assert server.http.post("/v1/token/encode", json={"text": "hi"}).json()["length"] == 2
        assert states(server.http) == {"alpha": "loaded"}
        assert 'waypoint_model_unloads_total{reason="idle"} 1.0' in server.http.get("/metrics").text


def test_events_begin_with_what_is_and_end_with_the_server(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    with running_server(scripted).running() as server:
        server.load("alpha")
        with server.http.stream("GET", "/v1/model/events") as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines)) == {"model": "alpha", "status": "loaded", "reason": None, "progress": None}
            server.load("beta")
            server.stop()
            *events, done = lines
        assert done == "[DONE]"
    told = [json.loads(event) for event in events]
    assert [(event["model"], event["status"], event["reason"]) for event in told if event["progress"] is None] == [
        ("beta", "loading", None), ("alpha", "unloaded", "displaced"), ("beta", "loaded", None),
    ]  # fmt: skip
    assert [event["progress"]["module"] for event in told if event["progress"] is not None] == [1, 2, 3]


# --- the real engine ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_models_of_the_real_engine_answer_side_by_side(tiny_llama: Path, tiny_hybrid: Path, tmp_path: Path) -> None:
    written = {"llama": ("alpaca", "### Instruction"), "hybrid": ("chatml", "<|im_start|>")}
    for name, source in (("llama", tiny_llama), ("hybrid", tiny_hybrid)):
        shutil.copytree(source, tmp_path / "models" / name)
        settings = f"model: {{max_seq_len: 2048, prompt_template: {written[name][0]}}}"
        (tmp_path / "models" / name / "tabby_config.yml").write_text(settings, encoding="utf-8")
    options = {"model-dir": tmp_path / "models", "inline-model-loading": "true", "max-models": 2}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with served(tmp_path, *arguments) as server, server.client() as http:

        def answer(name: str) -> tuple[str, str]:
            body = {"messages": [{"role": "user", "content": "Ada measured"}], "temperature": 0, "max_tokens": 12}
            response = http.post("/v1/chat/completions", json=body | {"model": name}).json()
            return response["model"], response["choices"][0]["message"]["content"]

        alone = {name: answer(name) for name in written}
        assert [model for model, _ in alone.values()] == list(written)
        names = [*written] * 4
        with ThreadPoolExecutor(len(names)) as threads:
            assert list(threads.map(answer, names)) == [alone[name] for name in names]
        for name, (_, sign) in written.items():
            body = {"messages": [{"role": "user", "content": "hi"}], "model": name}
            assert sign in http.post("/apply-template", json=body).json()["prompt"]
            status = http.get(f"/v1/models/{name}").json()["status"]
            assert status["value"] == "loaded"
            assert status["memory_bytes"] > 3_000_000
