"""Clients that go at whatever moment: nothing of their requests stays in the server or with the engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.endpoints.running import ADMIN_KEY, RunningServer, alpha_server, eventually, running_server
from tests.faults.leaks import held_at_rest_by, held_by, open_descriptors
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script

MANY = 8
SLOW = Play(when="slow", chunks=["x"] * 1000, delay=0.02)
READING = Play(when="reading", prefill=[(n, 1000) for n in range(1000)], delay=0.02)
BUSY, BUSIER = Play(when="busy", busy=0.1), Play(when="long", busy=1.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("scripted"))
    engine.add_model("alpha")
    engine.add_model("beta")
    engine.write(Script(plays=[SLOW, READING, BUSY, BUSIER, Play()], models={"beta": ModelScript(load_seconds=1.0)}))
    with running_server(engine).running() as server:
        server.load("alpha")
        yield server


class Client:
    """A connection that has sent one request as an administrator."""

    def __init__(self, server: RunningServer, path: str, body: object) -> None:
        url = httpx.URL(server.base_url)
        assert url.port is not None
        self._socket = socket.create_connection((url.host, url.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)

    def read_until(self, text: bytes) -> None:
        seen = b""
        while text not in seen:
            part = self._socket.recv(1)
            assert part, seen
            seen += part

    def go(self) -> None:
        self._socket.close()


async def tasks() -> int:
    return len(asyncio.all_tasks())


@contextmanager
def nothing_stays(server: RunningServer) -> Iterator[None]:
    assert server.http.get("/health").status_code == 200  # its connection stays open
    held = server.call(tasks()), open_descriptors()
    yield

    def is_as_before() -> bool:
        client = server.manager.require()
        at_rest = not (client._generations or client._calls or client._given_up)
        return at_rest and (server.call(tasks()), open_descriptors()) == held

    eventually(is_as_before)
    assert server.http.post("/v1/completions", json={"prompt": "hi"}).json()["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("prompt", ["slow", "reading", "busy"])
def test_while_a_request_is_answered(server: RunningServer, prompt: str, stream: bool) -> None:
    engine = server.manager.require()
    with nothing_stays(server):
        body = {"prompt": prompt, "stream": stream, "n": 2}
        clients = [Client(server, "/v1/completions", body) for _ in range(MANY)]
        eventually(lambda: engine.running == 2 * MANY)
        for client in clients:
            client.go()


def test_before_the_engine_has_heard_of_a_request(server: RunningServer) -> None:
    with nothing_stays(server):
        for _ in range(MANY):
            Client(server, "/v1/completions", {"prompt": "slow", "stream": True}).go()


@pytest.mark.parametrize("last_seen", [b'"finish_reason":"stop"', b'"text":"Hello"'])
def test_between_the_end_of_an_answer_and_the_end_of_its_stream(server: RunningServer, last_seen: bytes) -> None:
    with nothing_stays(server):
        for _ in range(MANY):
            client = Client(server, "/v1/completions", {"prompt": "hi", "stream": True})
            client.read_until(last_seen)
            client.go()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/token/encode", {"text": "hi"}), ("/v1/cache/explain", {"prompt": "hi"})],
)
def test_while_the_engine_is_too_busy_to_answer_a_question(
    server: RunningServer, path: str, body: dict[str, str]
) -> None:
    engine = server.manager.require()
    with nothing_stays(server):
        working = Client(server, "/v1/completions", {"prompt": "long"})
        eventually(lambda: engine.running == 1)
        asking = Client(server, path, body)
        eventually(lambda: len(engine._calls) == 1)
        asking.go()
        working.go()


def test_while_the_engine_is_started_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a request waits for, its place in the queue is free at once."""
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (600.0,))
    with alpha_server(tmp_path_factory.mktemp("server"), [Play(when="die", crash_after=0)]) as server:
        assert server.http.post("/v1/completions", json={"prompt": "die"}).status_code == 500
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        before = held_at_rest_by(server)
        places = server.state.queue._places
        for path, body, queued in [
            ("/completion", {"prompt": ["hi", 65]}, True),  # text and tokens: the engine is asked for those of the text
            ("/completion", {"prompt": "hi", "logit_bias": [["abc", 1.0]]}, True),
            ("/v1/completions", {"prompt": "hi"}, True),
            ("/v1/chat/completions", chat | {"stream": True}, True),
            ("/v1/token/encode", {"text": "hi"}, False),
            ("/tokenize", {"content": "hi"}, False),
            ("/detokenize", {"tokens": [65]}, False),
        ]:
            client = Client(server, path, body)
            eventually(lambda: held_by(server).tasks > before.tasks)
            eventually(lambda queued=queued: bool(places) == queued)  # type: ignore[misc]
            client.go()
            eventually(lambda: not places)
            eventually(lambda: held_by(server) == before)


def test_while_a_model_is_loaded(server: RunningServer) -> None:
    """The load goes on to its end."""
    with nothing_stays(server):
        client = Client(server, "/v1/model/load", {"model_name": "beta"})
        client.read_until(b'"processing"')
        client.go()
        eventually(lambda: server.manager.current is not None and server.manager.current.name == "beta")
        server.load("alpha")
