"""Streams and requests whose client goes away."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest
from loguru import logger

from tests.endpoints.running import RunningServer, eventually

CHAT = "/v1/chat/completions"


def body(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def tasks(server: RunningServer) -> set[str]:
    async def names() -> set[str]:
        current = asyncio.current_task()
        coroutines = [task.get_coro() for task in asyncio.all_tasks() if task is not current]
        return {getattr(coroutine, "__qualname__", "") for coroutine in coroutines}

    return server.call(names())


@pytest.mark.parametrize("text", ["HANG", "STALL", "PREFILL"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_ends_in_the_engine_when_its_client_goes(server: RunningServer, text: str, n: int) -> None:
    with server.http.stream("POST", CHAT, json=body(text, stream=True, n=n)) as response:
        assert response.status_code == 200
        assert server.requests_in_engine == n
    eventually(server.idle)
    assert server.http.post(CHAT, json=body("COUNT")).status_code == 200


@pytest.mark.parametrize("text", ["HANG", "STALL", "PREFILL"])
def test_a_request_without_stream_ends_in_the_engine_when_its_client_goes(server: RunningServer, text: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(CHAT, json=body(text, n=2), timeout=httpx.Timeout(30, read=0.5))
    eventually(server.idle)
    assert server.http.post(CHAT, json=body("COUNT")).status_code == 200


def test_nothing_is_left_over(server: RunningServer) -> None:
    server.http.post(CHAT, json=body("COUNT", n=2))
    eventually(server.idle)
    with server.http.stream("POST", CHAT, json=body("STALL", stream=True, n=2)) as response:
        assert next(response.iter_lines()).startswith("data: ")
    eventually(server.idle)
    ours = ("Answers.", "unless_disconnected", "_disconnected", "EventStream", "_frames", "Codec.", "_pump")
    eventually(lambda: not any(name.startswith(ours) for name in tasks(server)))


def test_pings_flow_while_the_prompt_is_processed(server: RunningServer) -> None:
    with server.http.stream("POST", CHAT, json=body("PREFILL", stream=True)) as response:
        assert response.status_code == 200
        assert next(line for line in response.iter_lines() if line).startswith(": ping")
    eventually(server.idle)


def test_a_late_refusal_is_a_frame(server: RunningServer) -> None:
    asked = len(server.engine.history())
    busy = threading.Thread(target=lambda: server.http.post(CHAT, json=body("BUSY")))
    busy.start()
    eventually(lambda: len(server.engine.history()) > asked)
    time.sleep(0.2)  # until the engine's thread is blocked, so that it does not look at the next prompt
    response = server.http.post(CHAT, json=body("x" * 5000, stream=True))
    busy.join(30)
    assert response.status_code == 200
    error, done = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert done == "data: [DONE]"


def test_other_requests_are_answered_while_a_stream_waits(server: RunningServer) -> None:
    with server.http.stream("POST", CHAT, json=body("HANG", stream=True)):
        assert server.http.get("/health").json() == {"status": "healthy", "issues": []}
        assert server.http.post(CHAT, json=body("COUNT")).status_code == 200
    eventually(server.idle)


def test_an_unload_tells_the_requests_in_flight(empty_server: RunningServer) -> None:
    empty_server.load("alpha")
    answers: list[httpx.Response] = []
    request = threading.Thread(target=lambda: answers.append(empty_server.http.post(CHAT, json=body("STALL"))))
    request.start()
    eventually(lambda: empty_server.requests_in_engine == 1)
    assert empty_server.admin.post("/v1/model/unload").status_code == 200
    request.join(30)
    [response] = answers
    assert (response.status_code, response.json()["error"]["code"]) == (503, "request_cancelled")


@pytest.mark.parametrize("end", ["unload", "shutdown"])
def test_streams_are_told_why_they_end(empty_server: RunningServer, end: str) -> None:
    empty_server.load("alpha")
    with empty_server.http.stream("POST", CHAT, json=body("STALL", stream=True)) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert '"role":"assistant"' in next(lines)
        if end == "unload":
            assert empty_server.admin.post("/v1/model/unload").status_code == 200
        else:
            empty_server.stop()
        *_, error, done = list(lines)
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_cancelled"


@pytest.mark.parametrize(("prompt", "until", "left_early"), [("COUNT", "[DONE]", False), ("STALL", "role", True)])
def test_only_a_client_that_leaves_before_the_end_is_logged(
    server: RunningServer, prompt: str, until: str, left_early: bool
) -> None:
    """OpenAI's client closes the connection as soon as it reads the terminator."""
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    try:
        with server.http.stream("POST", CHAT, json=body(prompt, stream=True)) as response:
            next(line for line in response.iter_lines() if until in line)
        eventually(lambda: any(CHAT in line for line in lines))
    finally:
        logger.remove(sink)
    assert any("has gone" in line for line in lines) == left_early
