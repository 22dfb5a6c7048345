from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from loguru import logger

from endpoints import request_log
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
EVERYTHING = {
    "log_prompt": True,
    "log_generation_params": True,
    "log_requests": True,
    "log_chat_completion_requests": True,
}


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}")
    yield lines
    logger.remove(sink)


@contextmanager
def serving(engine: ScriptedEngine, **sections: dict[str, bool]) -> Iterator[RunningServer]:
    engine.write(Script())
    with running_server(engine, auth=True, presets=None, **sections).running() as running:
        running.load("alpha")
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that logs all it can."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    with serving(engine, logging=EVERYTHING) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go; empty at first."""
    directory = tmp_path / "logs" / "debug"
    monkeypatch.setattr(request_log, "DEBUG_DIRECTORY", directory)
    return directory


def ask(server: RunningServer, body: object, **options: Any) -> httpx.Response:
    response = server.http.post(CHAT, json=body, **options)
    assert response.status_code == 200, response.text
    return response


def logged(log: list[str], start: str) -> list[str]:
    """What follows `start` in the entries that begin with it."""
    return [entry.removeprefix(start).rstrip("\n") for entry in log if entry.startswith(start)]


def dumped(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


# --- log_prompt, log_generation_params --------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_prompts_and_parameters_are_logged_once_for_all_answers(open_server: RunningServer, log: list[str]) -> None:
    ask(open_server, HI | {"n": 3, "temperature": 0.5, "stop": ["END"]})
    assert logged(log, "INFO Prompt:\n") == [PROMPT.rstrip("\n")]
    (parameters,) = [json.loads(entry) for entry in logged(log, "INFO Generation parameters: ")]
    assert parameters["sampling"]["temperature"] == 0.5
    assert parameters["stop_strings"] == ["END", "<|im_end|>", "<|im_start|>"]  # the request's, then the template's
    assert "prompt" not in parameters


def test_every_prompt_of_a_list_is_logged(open_server: RunningServer, log: list[str]) -> None:
    body = {"prompt": [[104, 105], [111]], "seed": 1, "n": 2}
    assert open_server.http.post("/v1/completions", json=body).status_code == 200
    assert logged(log, "INFO Prompt:\n") == ["[104, 105]", "[111]"]
    assert [json.loads(entry)["seed"] for entry in logged(log, "INFO Generation parameters: ")] == [1, 2]


# --- log_requests -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_requests_are_logged_without_keys(open_server: RunningServer, log: list[str]) -> None:
    secrets = {"hf_token": "secret", "metadata": [{"deep": {"X-API-Key": ["secret"], "name": "kept"}}]}
    headers = {
        "Cookie": "session=secret",
        "x-api-key": API_KEY,
        "x-admin-key": ADMIN_KEY,
        "Proxy-Authorization": "secret",
        "User-Agent": "someone",
    }
    ask(open_server, HI | secrets, headers=headers)
    (shown,) = [json.loads(entry) for entry in logged(log, f"INFO POST '{CHAT}' with headers ")]
    assert shown["user-agent"] == "someone"
    assert {name for name, value in shown.items() if value == "[REDACTED]"} == {
        *("authorization", "cookie", "proxy-authorization", "x-admin-key", "x-api-key"),
    }
    (body,) = [json.loads(entry) for entry in logged(log, "INFO Body: ")]
    assert body == HI | {
        "hf_token": "[REDACTED]",
        "metadata": [{"deep": {"X-API-Key": "[REDACTED]", "name": "kept"}}],
    }
    assert not any(secret in entry for entry in log for secret in ("secret", API_KEY, ADMIN_KEY))


def test_bodies_of_strangers_are_not_logged(open_server: RunningServer, folder: Path, log: list[str]) -> None:
    assert open_server.anonymous.post(CHAT, json=HI | {"note": "spam"}).status_code == 401
    assert open_server.anonymous.post("/v1/nothing", json={"note": "spam"}).status_code == 404
    assert open_server.anonymous.request("GET", "/health", json={"note": "spam"}).status_code == 200
    assert logged(log, f"INFO POST '{CHAT}' with headers ")
    assert logged(log, "INFO POST '/v1/nothing' with headers ")
    assert logged(log, "DEBUG GET '/health' with headers ")
    assert not any("spam" in entry for entry in log)
    assert not folder.exists()


def test_requests_without_a_body_have_none_in_the_log(open_server: RunningServer, log: list[str]) -> None:
    assert open_server.http.get("/v1/models").status_code == 200
    assert logged(log, "INFO GET '/v1/models' with headers ")
    assert logged(log, "INFO Body: ") == []


@pytest.mark.usefixtures("folder")
def test_half_a_surrogate_pair_can_be_logged(open_server: RunningServer, log: list[str]) -> None:
    content = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'
    response = open_server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    (body,) = [json.loads(entry) for entry in logged(log, "INFO Body: ")]
    assert body["messages"][0]["content"] == "cut ?"


# --- log_chat_completion_requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_written_with_its_prompt_beside_it(open_server: RunningServer, folder: Path, stream: bool) -> None:
    body = HI | {"stream": stream, "api_key": "secret"}
    ask(open_server, body, params={"token": "secret", "user": "me"}, headers={"X-Request-Id": "trace:1.2"})
    (text,) = folder.glob("*.txt")
    assert text.read_bytes().decode() == PROMPT
    (path,) = folder.glob("*.json")
    assert path.stem == text.stem
    assert path.stem.endswith("Z_trace-1.2")
    content = dumped(folder)
    assert content["schema"] == "waypoint.chat_completion_request.v1"
    request = content["request"]
    assert request["body"] == body | {"api_key": "[REDACTED]"}
    assert (request["method"], request["path"], request["url"]) == ("POST", CHAT, f"[REDACTED]{CHAT}")
    assert request["query"] == {"token": "[REDACTED]", "user": "me"}
    for name in ("authorization", "host", "user-agent"):
        assert request["headers"][name] == "[REDACTED]"
    assert request["headers"]["content-type"] == "application/json"
    assert "secret" not in path.read_text()
    if os.name == "posix":
        assert {file.stat().st_mode & 0o777 for file in (path, text)} == {0o600}


def test_each_request_has_files_of_its_own(open_server: RunningServer, folder: Path) -> None:
    for path in (CHAT, CHAT.removeprefix("/v1")):
        assert open_server.http.post(path, json=HI, headers={"X-Request-Id": "same"}).status_code == 200
    assert open_server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".txt", ".txt"]


def test_a_chat_that_is_refused_is_written_too(open_server: RunningServer, folder: Path) -> None:
    headers = {"Content-Type": "application/json"}
    assert open_server.http.post(CHAT, content=b'{"api_key": "secret', headers=headers).status_code == 400
    assert dumped(folder)["request"]["body"] == {"not_json": "19 bytes"}
    assert not list(folder.glob("*.txt"))


def test_a_file_that_cannot_be_written_costs_nothing(open_server: RunningServer, folder: Path, log: list[str]) -> None:
    folder.parent.write_text("a file in the way")
    ask(open_server, HI)
    assert len([entry for entry in log if entry.startswith("WARNING") and "was not written" in entry]) == 2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("depth", [900, 950, 980, 1000, 100_000])
def test_a_deep_body_fares_as_if_nothing_were_logged(
    open_server: RunningServer, server: RunningServer, depth: int
) -> None:
    content = json.dumps(HI)[:-1].encode() + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
    answers = [
        each.http.post(CHAT, content=content, headers={"Content-Type": "application/json"}).status_code
        for each in (open_server, server)
    ]
    assert answers[0] == answers[1]


# --- switches ---------------------------------------------------------------------------------------------------------


def test_nothing_of_it_is_logged_unless_asked_for(server: RunningServer, folder: Path, log: list[str]) -> None:
    ask(server, HI)
    eventually(lambda: any("200 in" in entry for entry in log))  # the outcome is logged when the answer has gone
    assert not any("headers" in entry or "Body" in entry or "im_start" in entry or "temp" in entry for entry in log)
    assert not folder.exists()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_streams_can_be_turned_off(scripted: ScriptedEngine, path: str) -> None:
    with serving(scripted, developer={"disable_request_streaming": True}) as server:
        response = server.http.post(path, json=HI | {"prompt": "hi", "stream": True})
        assert response.headers["Content-Type"] == "application/json"
        answer = response.json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] > 0
