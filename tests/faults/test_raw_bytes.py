"""Whatever bytes arrive at whatever route: an answer in the API's own form where the request can be understood, never a
server error, and a server that goes on serving."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import h11
import pytest
from loguru import logger

from endpoints.routing import route_table
from endpoints.server import create_app
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, eventually, running_server
from tests.faults.raw_bytes import Case, CaseMaker, request
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script
from tests.serving import ROOT

# What an administrator's request may bring about: after an unload there is no model.
HONEST = {"model_not_loaded", "server_busy", "queue_timeout"}
ANSWER_SECONDS = 60
SLOW_SECONDS = 180
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
LEAKS = (b"Traceback (most recent call last)", b"site-packages", str(ROOT).encode())


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@contextmanager
def errors_logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is logged with a traceback or as an error, by us and by others."""
    found: list[str] = []
    sink = logger.add(found.append, format="{message}\n{exception}", level="ERROR")
    traces = logger.add(
        found.append, format="{message}\n{exception}", filter=lambda record: record["exception"] is not None
    )
    with caplog.at_level(logging.ERROR):
        yield found
    found += [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    logger.remove(sink)
    logger.remove(traces)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("raw-bytes"))
    engine.write(Script())
    for name in ("alpha", "beta"):
        engine.add_model(name)
    with running_server(engine, network={"max_body_mb": 1, "body_timeout": 5}).running() as server:
        server.load("alpha")
        yield server


@pytest.mark.parametrize("seed", [1])
def test_every_route_withstands(seed: int, server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(server, caplog, seed, rounds=3)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
        (b"chunked", b"2\r\n{}xx0\r\n\r\n"),
        (b"chunked", b"0\r\nA: b\r\nTransfer-Encoding: x\r\n\r\n"),
        (b"gzip", b"{}"),
        (b"gzip, chunked", b"2\r\n{}\r\n0\r\n\r\n"),
    ],
)
def test_a_body_that_breaks_off(
    server: RunningServer, caplog: pytest.LogCaptureFixture, method: str, encoding: bytes, body: bytes
) -> None:
    """uvicorn answers in place of the application, which may have begun to."""
    data = request(method, "/ready", [(b"Transfer-Encoding", encoding)], None, close=False) + body
    case = Case("broken", data, (method,))
    with errors_logged(caplog) as errors:
        responses = exchange(server, case)
        assert server.anonymous.get("/health").is_success
    assert check(case, responses, server.engine.root) is None
    assert not errors


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECONDS + 240)
def test_every_route_withstands_new_bytes(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    end = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        fuzz(server, caplog, secrets.randbits(32), rounds=20)


def fuzz(server: RunningServer, caplog: pytest.LogCaptureFixture, seed: int, rounds: int) -> None:
    """Send so many cases to each route."""
    print(f"seed {seed}")  # pytest shows it with a failure
    app = create_app(server.settings, server.engine.manager(), None)
    # All but a stream that does not end, and what asks a hub on the internet.
    routes = [row for row in route_table(app) if not row.path.endswith(("/events", "/download"))]
    cases = CaseMaker(app.openapi(), (API_KEY, ADMIN_KEY), Random(seed))
    with errors_logged(caplog) as errors:
        for number in range(rounds * len(routes)):
            case = cases.case(routes[number % len(routes)])
            problem = check(case, exchange(server, case), server.engine.root)
            problem = problem or (f"it logs {errors}" if errors else None)
            assert problem is None, f"seed {seed}, number {number}, {case.title}: {problem}\n{case.data[:3000]!r}"
            if number % len(routes) == 0:
                restore(server)
        restore(server)
        eventually(server.idle)
        assert server.anonymous.get("/health").status_code == 200
        answer = server.http.post("/v1/chat/completions", json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world", answer.text
    assert not errors


def restore(server: RunningServer) -> None:
    """Undo what administrators may do: a model with its template, and no overrides."""
    server.admin.post("/v1/sampling/override/unload").raise_for_status()
    server.load("alpha")
    server.admin.post("/v1/template/switch", json={"prompt_template_name": "chatml"}).raise_for_status()


def exchange(server: RunningServer, case: Case) -> list[Response] | str:
    """Send a case. Returns what is answered, or what is wrong with it."""
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
        try:
            connection.sendall(case.data)
            if case.abort:
                # Not in order, but with a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return []
            if not case.whole:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has answered and closed before all of it was sent
        try:
            return read_responses(connection, case.methods)
        except TimeoutError:
            return "the server neither answers nor closes"
        except h11.RemoteProtocolError as error:
            return f"what is answered is no HTTP: {error}"


def read_responses(connection: socket.socket, methods: tuple[str, ...]) -> list[Response]:
    """Read strictly, until each request has its answer or the server closes.

    Raises:
        h11.RemoteProtocolError: what comes is malformed, or cut off.
        TimeoutError: nothing comes.
    """
    reader = h11.Connection(h11.CLIENT)

    def fill() -> bool:
        """Whether there is more."""
        try:
            data = connection.recv(65536)
        except ConnectionError:
            data = b""
        reader.receive_data(data)
        return bool(data)

    def next_event() -> object:
        while (event := reader.next_event()) is h11.NEED_DATA:
            fill()
        return event

    responses: list[Response] = []
    for method in methods:
        if not reader.trailing_data[0] and not fill():  # closed between two responses
            break
        reader.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        head = next_event()
        assert isinstance(head, h11.Response), head
        body = bytearray()
        while isinstance(event := next_event(), h11.Data):
            body += event.data
        responses.append(Response(head.status_code, dict(head.headers), bytes(body)))
        if h11.MUST_CLOSE in (reader.our_state, reader.their_state):
            break
        reader.start_next_cycle()
    return responses


def check(case: Case, responses: list[Response] | str, folder: Path) -> str | None:
    """What is wrong with the answers to a case, or None."""
    if isinstance(responses, str):
        return responses
    if case.whole and len(responses) < len(case.methods) and not closes_early(responses):
        return f"{len(responses)} of {len(case.methods)} requests were answered"
    for response, method in zip(responses, case.methods, strict=False):
        if problem := wrong_with(response, method, folder):
            return f"{problem}: {response.status} {response.body[:1000]!r}"
    return None


def closes_early(responses: list[Response]) -> bool:
    """Whether the server said that it will not read what else a client has sent."""
    return bool(responses) and responses[-1].headers.get(b"connection") == b"close"


def wrong_with(response: Response, method: str, folder: Path) -> str | None:
    if any(leak in response.body for leak in (*LEAKS, str(folder).encode())):
        return "tells what is none of a client's business"
    if method == "HEAD":
        return None if response.status < 500 or response.status == 503 else "is a server error"
    kind = response.headers.get(b"content-type", b"")
    if kind.startswith(b"text/event-stream"):
        return wrong_with_stream(response.body)
    if not kind.startswith(b"application/json"):
        # A browser that asks what it may send is answered by CORS, before there is a request.
        asked_by_browser = b"x-request-id" not in response.headers and response.status in (200, 400)
        return None if response.status < 400 or asked_by_browser else "is no envelope"
    body = json.loads(response.body, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    if response.status < 400:
        return None
    error = body.get("error", {})
    # The envelopes of Ollama and Anthropic have no codes.
    if isinstance(error, str) or body.get("type") == "error":
        return None if response.status < 500 or response.status == 503 else "is a server error"
    if not {"message", "type", "param", "code"} <= error.keys() or not error["message"]:
        return "is no envelope"
    if response.status >= 500 and error["code"] not in HONEST:
        return "is a server error"
    return None


def wrong_with_stream(body: bytes) -> str | None:
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    terminated = events[-1:] == [b"[DONE]"]
    payloads = [json.loads(event) for event in events[: len(events) - terminated]]
    if not payloads:
        return "holds nothing"
    failed = [payload["error"].get("code") for payload in payloads if payload.get("error")]
    if failed and failed[0] in ("server_error", "engine_failed"):
        return f"fails with {failed}"
    if not terminated and not failed and not says_the_end(payloads[-1]):
        return "does not end"
    return None


def says_the_end(event: dict[str, Any]) -> bool:
    """Whether it is the last one of an API whose streams have no terminator."""
    last_types = ("message_stop", "response.completed", "response.incomplete", "response.failed")
    return bool(event.get("stop") or event.get("finish_reason")) or event.get("type") in last_types
