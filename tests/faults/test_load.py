"""More requests than the engine can serve at once, and clients that take their time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from common.errors import QueueTimeout
from common.generation import TextDelta
from tests.endpoints.running import RunningServer, alpha_server, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script
from tests.serving import served

PLAYS = [
    Play(when="HANG", hang_after=0),
    Play(when="STALL", chunks=["a "], hang_after=1),
    Play(when="SHORT", chunks=["one ", "two"], delay=0.01),
    Play(when="SLOW", chunks=["a", "b", "c", "d", "e"], delay=0.3),
]
# More than the buffers between the server and its client hold.
MEGABYTES = Play(when="MEGABYTES", deltas=[TextDelta("x" * 100_000, [1])] * 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Four requests may wait, two of a key."""
    with alpha_server(
        tmp_path_factory.mktemp("server"), PLAYS, network={"max_queue": 4, "max_queue_per_key": 2}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A request may wait for a second."""
    with alpha_server(tmp_path_factory.mktemp("hurried"), PLAYS, network={"queue_timeout": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """As it is set up by default."""
    with alpha_server(tmp_path_factory.mktemp("patient"), PLAYS) as running:
        yield running


def asked(prompt: str, *, stream: bool = False, **fields: object) -> dict[str, object]:
    return {"prompt": prompt, "stream": stream, **fields}


@contextmanager
def in_flight(client: httpx.Client, prompt: str, count: int = 1, **fields: object) -> Iterator[None]:
    """Streams that have been accepted, until the block is left."""
    with ExitStack() as streams:
        for _ in range(count):
            response = streams.enter_context(
                client.stream("POST", "/v1/completions", json=asked(prompt, stream=True, **fields))
            )
            assert response.status_code == 200
        yield


def waiting(server: RunningServer) -> float | None:
    return server.state.metrics.registry.get_sample_value("waypoint_requests_waiting")


def refused(server: RunningServer, code: str) -> float | None:
    return server.state.metrics.registry.get_sample_value("waypoint_requests_refused_total", {"code": code})


# --- the bounded queue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/completion", {"prompt": "hi"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/completions", {"temperature": "not looked at"}),
    ],
)
def test_beyond_the_queue_of_a_key_429(server: RunningServer, path: str, body: dict[str, object]) -> None:
    before = refused(server, "rate_limit_exceeded")
    with in_flight(server.http, "HANG", 2):
        response = server.http.post(path, json=body)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "network.max_queue_per_key" in error["message"]
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert refused(server, "rate_limit_exceeded") == (before or 0) + 1
        assert server.other.post("/v1/completions", json=asked("SHORT")).status_code == 200
        assert server.http.get("/v1/models").status_code == 200
    eventually(lambda: waiting(server) == 0)


def test_beyond_the_queue_503(server: RunningServer) -> None:
    with in_flight(server.http, "HANG", 2), in_flight(server.other, "HANG", 2):
        assert waiting(server) == 4
        response = server.admin.post("/v1/completions", json=asked("hi"))
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "server_busy")
        assert "network.max_queue" in error["message"]
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert server.anonymous.get("/ready").status_code == 200
    eventually(lambda: waiting(server) == 0)
    assert server.admin.post("/v1/completions", json=asked("SHORT")).status_code == 200


def test_an_administrator_has_no_queue_of_a_key(server: RunningServer) -> None:
    with in_flight(server.admin, "HANG", 3):
        assert server.admin.post("/v1/completions", json=asked("SHORT")).status_code == 200


def test_what_has_begun_waits_no_longer(server: RunningServer) -> None:
    with in_flight(server.http, "STALL", 8):
        eventually(lambda: waiting(server) == 0)
        assert server.http.post("/v1/completions", json=asked("SHORT")).status_code == 200


def test_a_request_has_one_place_for_all_its_answers(server: RunningServer) -> None:
    with in_flight(server.http, "HANG", n=8), in_flight(server.http, ["HANG", "HANG", "HANG"]):  # type: ignore[arg-type]
        assert waiting(server) == 2


@pytest.mark.parametrize("body", [{"prompt": 1.5}, {"prompt": "x" * 5000}, {"prompt": "hi", "n": 2, "best_of": 1}])
def test_a_request_that_is_refused_gives_its_place_back(server: RunningServer, body: dict[str, object]) -> None:
    for _ in range(5):
        assert server.http.post("/v1/completions", json=body).status_code == 400
    assert waiting(server) == 0


def test_a_request_whose_client_has_gone_gives_its_place_back(server: RunningServer) -> None:
    for stream in (False, True):
        with (
            pytest.raises(httpx.ReadTimeout),
            server.http.stream("POST", "/v1/completions", json=asked("HANG", stream=stream), timeout=0.3) as response,
        ):
            response.read()
        eventually(lambda: waiting(server) == 0)
    assert server.idle()


# --- who waits too long -----------------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_ends_with_503(hurried: RunningServer) -> None:
    response = hurried.http.post("/v1/completions", json=asked("HANG"))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    assert "network.queue_timeout" in response.json()["error"]["message"]
    assert "Retry-After" in response.headers
    assert refused(hurried, QueueTimeout.code) == 1
    assert waiting(hurried) == 0
    eventually(hurried.idle)


def test_a_stream_that_waits_too_long_ends_with_an_event(
    hurried: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("endpoints.streaming.ACCEPT_SECONDS", 0.1)
    response = hurried.http.post("/v1/completions", json=asked("HANG", stream=True))
    assert response.status_code == 200
    *_, error, done, _ = response.text.replace("\r", "").split("\n\n")
    assert '"code":"queue_timeout"' in error
    assert done == "data: [DONE]"
    eventually(hurried.idle)


def test_what_has_begun_may_take_longer(hurried: RunningServer) -> None:
    response = hurried.http.post("/v1/completions", json=asked("SLOW"))
    assert response.json()["choices"][0]["text"] == "abcde"


def test_waiting_for_an_engine_that_restarts_counts(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (600.0,))
    scripted.write(Script(plays=[Play(when="CRASH", crash_after=0)]))
    with running_server(scripted, network={"queue_timeout": 1}).running() as server:
        server.load("alpha")
        assert server.http.post("/v1/completions", json=asked("CRASH")).status_code == 500
        bodies = [
            ("/v1/completions", asked("hi")),
            ("/completion", {"prompt": ["hi", 65]}),  # asks the engine for tokens first
        ]
        for path, body in bodies:
            response = server.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")


# --- many at once -----------------------------------------------------------------------------------------------------


def test_64_clients_at_once_are_all_answered(patient: RunningServer) -> None:
    def ask(number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"SHORT {number}"}], "stream": number % 2 == 0}
        response = patient.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.text

    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(ask, range(64)))
    assert all("one " in answer and '"finish_reason":"stop"' in answer for answer in answers)
    eventually(lambda: patient.idle() and waiting(patient) == 0)


def test_connections_that_do_nothing_do_not_stop_the_others(patient: RunningServer) -> None:
    with ExitStack() as idle:
        for number in range(200):
            connection = idle.enter_context(connected(patient))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        with httpx.Client(base_url=patient.base_url) as client:  # and so another connection
            assert client.get("/health").status_code == 200
        assert patient.http.post("/v1/completions", json=asked("SHORT")).status_code == 200


@pytest.mark.slow
def test_keys_take_turns_on_an_engine_with_one_slot(tiny_llama: Path, tmp_path: Path) -> None:
    with (
        served(tmp_path, "--max-batch-size", "1", model=tiny_llama) as server,
        server.client() as one,
        server.client(server.admin_key) as other,
        ThreadPoolExecutor(8) as clients,
    ):
        order: list[str] = []

        def ask(name: str, client: httpx.Client, max_tokens: int) -> None:
            body = {"prompt": name, "max_tokens": max_tokens, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
            order.append(name)

        def queued() -> float:
            text = other.get("/metrics").text
            return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("waypoint_requests_wai"))

        for count in range(6):  # the first runs long enough for all others to be in the queue
            clients.submit(ask, "one", one, 8 if count else 200)
            eventually(lambda count=count: queued() == count)  # type: ignore[misc]
        for count in range(2):
            clients.submit(ask, "other", other, 8)
            eventually(lambda count=count: queued() == 6 + count)  # type: ignore[misc]
        clients.shutdown()
        assert order == ["one", "other", "one", "other", "one", "one", "one", "one"]


# --- clients that take their time -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Clients have a second for whatever they do."""
    with alpha_server(
        tmp_path_factory.mktemp("impatient"), [*PLAYS, MEGABYTES], network={"stream_timeout": 1, "body_timeout": 1}
    ) as running:
        yield running


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.base_url).port or 0), timeout=60)


def head(server: RunningServer, length: int) -> bytes:
    key = server.http.headers["Authorization"]
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def read_to_the_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_reads_nothing_is_given_up(impatient: RunningServer, log_lines: list[str], stream: str) -> None:
    body = f'{{"prompt": "MEGABYTES", "stream": {stream}}}'.encode()
    with connected(impatient) as connection:
        connection.sendall(head(impatient, len(body)) + body)
        eventually(lambda: not impatient.idle())
        eventually(lambda: any("read nothing" in line for line in log_lines))
        eventually(impatient.idle)
    assert sum("network.stream_timeout" in line for line in log_lines) == 1


def test_a_client_that_reads_nothing_does_not_hold_up_the_end_of_the_server(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.write(Script(plays=[MEGABYTES]))
    body = b'{"prompt": "MEGABYTES", "stream": true}'
    with running_server(scripted).running() as server, connected(server) as connection:
        server.load("alpha")
        connection.sendall(head(server, len(body)) + body)
        eventually(lambda: server.idle() and len(scripted.history()) == 1)
        server.stop()
        server.join()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_reads_slowly_is_served(impatient: RunningServer, log_lines: list[str]) -> None:
    body = b'{"prompt": "MEGABYTES", "stream": true}'
    with connected(impatient) as connection:
        connection.sendall(head(impatient, len(body)) + body)
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += connection.recv(400_000)
            time.sleep(0.08)
    assert not any("read nothing" in line for line in log_lines)


@pytest.mark.parametrize("sent", [b"", b'{"prompt"'])
def test_a_body_that_does_not_come(impatient: RunningServer, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(head(impatient, 100) + sent)
        response = read_to_the_end(connection)  # the server closes it
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in response.lower()
    assert b'"code":"body_timeout"' in response
    assert b"network.body_timeout" in response
    assert waiting(impatient) == 0


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come(impatient: RunningServer, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        assert read_to_the_end(connection) == b""


def test_a_second_head_that_does_not_come(impatient: RunningServer) -> None:
    with connected(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        for byte in (b"G", b"E", b"T"):  # which keep it from being idle
            time.sleep(0.2)
            connection.sendall(byte)
        read_to_the_end(connection)


def test_an_answer_may_take_longer_than_its_request(impatient: RunningServer) -> None:
    response = impatient.http.post("/v1/completions", json=asked("SLOW"))
    assert response.json()["choices"][0]["text"] == "abcde"
