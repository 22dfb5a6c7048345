"""Bytes that no HTTP library would send: what is no request is refused, and nothing reaches a route it should not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from endpoints.protocol import MAX_HEADER_BYTES
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

KEY = f"Authorization: Bearer {API_KEY}"
ADMIN = f"x-admin-key: {ADMIN_KEY}"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool  # by the server, after the answer

    @property
    def error(self) -> str:
        body = json.loads(self.body)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["detail"] == body["error"]["message"]
        return str(body["detail"])


def exchange(server: RunningServer, sent: bytes) -> bytes:
    """What the server sends for some bytes: an answer, or all until it closes the connection if it says it will."""
    url = httpx.URL(server.base_url)
    received = b""
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(sent)
        while not is_complete(received):
            piece = connection.recv(65536)
            if not piece:
                return received + b"<closed>"
            received += piece
    return received


def is_complete(received: bytes) -> bool:
    """Whether an answer is there, after which the server keeps the connection."""
    head, end, body = received.rpartition(b"\r\n\r\n") if b" 100 " in received[:20] else received.partition(b"\r\n\r\n")
    length = [line.split()[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end and length) and len(body) >= int(length[0]) and b"connection: close" not in head.lower()


def send(server: RunningServer, *lines: str | bytes, body: bytes = b"") -> Answer:
    raw = b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in (*lines, b"", b""))
    return parse(exchange(server, raw + body))


def parse(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    start, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(start.split()[1]), headers, body.removesuffix(b"<closed>"), body.endswith(b"<closed>"))


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("keyless"))
    engine.write(Script())
    engine.model_dir.mkdir(exist_ok=True)
    with running_server(engine, auth=False).running() as running:
        yield running


def test_nothing_is_held_back(server: RunningServer) -> None:
    """Otherwise the kernel keeps each small piece until the client has acknowledged the one before."""
    assert server.http.get("/health").status_code == 200
    connections = list(server._server.server_state.connections)
    sockets = [connection.transport.get_extra_info("socket") for connection in connections]
    assert sockets
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


# --- what is no request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        ["GET /health"],  # HTTP/0.9
        ["GET /health HTTP/1.1"],  # no Host
        ["GET /health HTTP/1.1", "Host: x", "Host: y"],
        ["GET /health HTTP/1.1", "Host: x", "No colon"],
        ["GET /health HTTP/1.1", "Host: x", "Space before : colon"],
        ["GET /health HTTP/1.1", "Host: x", b"X: nul\0"],
        ["GET /health HTTP/1.1", "Host: x", "Content-Length: -1"],
        ["GET /health HTTP/1.1", "Host: x", "Content-Length: 1e3"],
        ["GET /health HTTP/1.1", "Host: x", "Content-Length: 1", "Content-Length: 2"],
        ["GET /hea lth HTTP/1.1", "Host: x"],
        [b"GET /\xff HTTP/1.1", "Host: x"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],  # TLS
        [b"\0" * 100],
    ],
)
def test_what_is_no_http(server: RunningServer, lines: list[str | bytes]) -> None:
    answer = send(server, *lines)
    assert (answer.status, answer.closed, answer.headers["content-type"]) == (400, True, "application/json")
    assert "no HTTP request" in answer.error


def test_an_unknown_transfer_encoding(server: RunningServer) -> None:
    answer = send(server, "POST /v1/completions HTTP/1.1", "Host: x", KEY, "Transfer-Encoding: gzip, chunked")
    assert (answer.status, answer.closed) == (400, True)
    assert "chunked" in answer.error


@pytest.mark.parametrize("more", [b"X: " + b"y" * 100_000, b"X: y\r\n" * 20_000])
def test_headers_that_do_not_end(server: RunningServer, more: bytes) -> None:
    answer = parse(exchange(server, b"GET /health HTTP/1.1\r\nHost: x\r\n" + more))
    assert (answer.status, answer.closed) == (431, True)
    assert f"{MAX_HEADER_BYTES // 1024} KB" in answer.error


def test_many_headers_that_are_small(server: RunningServer) -> None:
    answer = send(server, "GET /v1/auth/permission HTTP/1.1", "Host: x", KEY, *["a:b"] * 10_000)
    assert (answer.status, answer.body) == (200, b'{"permission":"api"}')


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\x80" * 1000, b"\x01\x1f\x7f", "😀".encode(), b'"', b"%00%0d%0a"])
def test_odd_bytes_in_headers(server: RunningServer, value: bytes) -> None:
    names = (b"User-Agent", b"Cookie", b"Accept", b"Content-Type", b"X-Request-Id", b"Origin", b"If-None-Match")
    for name in names:
        answer = send(server, "GET /v1/auth/permission HTTP/1.1", "Host: x", KEY, name + b": " + value)
        assert answer.status == 200, (name, value)


# --- where a body ends ------------------------------------------------------------------------------------------------

SMUGGLED = f"GET /v1/auth/permission HTTP/1.1\r\nHost: x\r\n{ADMIN}\r\n\r\n".encode()


def test_two_ways_to_say_where_a_body_ends(server: RunningServer) -> None:
    """A proxy that reads the one while we read the other would take what follows for another client's request."""
    head = "POST /v1/completions HTTP/1.1", "Host: x", KEY, "Content-Type: application/json"
    both = "Content-Length: 5", "Transfer-Encoding: chunked"
    for order in (both, both[::-1]):
        received = exchange(server, b"\r\n".join(line.encode() for line in (*head, *order, "", "0", "", "")) + SMUGGLED)
        answer = parse(received)
        assert (answer.status, answer.closed) == (400, True)
        assert "not both" in answer.error
        assert received.count(b"HTTP/1.1") == 1


def test_a_body_that_is_longer_than_it_says(server: RunningServer) -> None:
    answer = send(server, "GET /health HTTP/1.1", "Host: x", "Content-Length: 0", body=b"no request\r\n\r\n")
    assert answer.status == 200
    assert answer.body.startswith(b'{"status":"healthy","issues":[]}')


def test_a_body_that_is_shorter_than_it_says(server: RunningServer) -> None:
    url = httpx.URL(server.base_url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{KEY}\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt":')
    assert server.http.get("/v1/model").status_code == 200


def test_broken_chunks(server: RunningServer) -> None:
    head = "POST /v1/completions HTTP/1.1", "Host: x", KEY, "Transfer-Encoding: chunked"
    for chunks in (b"zz\r\n", b"-1\r\n", b"5\r\nab\r\n0\r\n\r\n", b"ffffffffffffffffffffff\r\n"):
        answer = send(server, *head, body=chunks)
        assert (answer.status, answer.closed) == (400, True), chunks


def test_a_client_that_waits_to_be_asked_for_its_body(server: RunningServer) -> None:
    head = ["POST /v1/token/encode HTTP/1.1", "Host: x", "Expect: 100-continue", "Content-Length: 12"]
    refused = send(server, *head)
    assert refused.status == 401
    answer = exchange(server, "\r\n".join([*head, KEY, "Content-Type: application/json", "", '{"text":"a"}']).encode())
    assert b" 100 " in answer.split(b"\r\n")[0]
    assert b"HTTP/1.1 200" in answer


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        *("http://x/v1/models", "http://evil.example/v1/models", "//v1/models", "//x/v1/models", "/v1//models"),
        *("/./v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/v1/models%00", "/v1/models;x=y"),
        *("/V1/MODELS", "/v1/models%2f", "/health%2f..%2fv1%2fmodels", "*", "/%2fv1/models", "/v1/models\\"),
        *("/health?/v1/models", "/health#/v1/models", "/v1%2fmodels", "/v1/%6dodels", "/v1/model/../models"),
    ],
)
def test_no_spelling_of_a_path_goes_around_the_key(server: RunningServer, target: str) -> None:
    """A path is open, unknown, or asks for the key."""
    answer = send(server, f"GET {target} HTTP/1.1", "Host: x")
    assert answer.status in (401, 404, 307) or target.startswith("/health")
    assert b"alpha" not in answer.body
    if answer.status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_an_upgrade_is_not_made(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"
    assert send(server, "GET /v1/models HTTP/1.1", "Host: x", *upgrade).status == 401
    assert send(server, "GET /health HTTP/1.1", "Host: x", "Upgrade: h2c", "Connection: Upgrade").status == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # Java's client asks each time


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization:"],
        ["Authorization: Bearer"],
        ["Authorization: Bearer " + "x" * 60_000],
        [f"Authorization: {API_KEY}"],
        [f"Authorization: Basic {API_KEY}"],
        [f"Authorization: BearerX {API_KEY}"],
        [f"Authorization: Bearer {API_KEY}x"],
        [f"Authorization: Bearer {API_KEY}, Bearer {API_KEY}"],
        [f"Authorization: Bearer\0{API_KEY}"],
        [b"Authorization: Bearer \xff\xfe\xfd"],
        ["Authorization: Bearer wrong"] * 1000,
        ["x-api-key: wrong"] * 1000,
        [f"X_API_KEY: {API_KEY}"],
        [f"Cookie: api_key={API_KEY}; " + "c=d;" * 10_000],
        [f"Proxy-Authorization: Bearer {API_KEY}"],
    ],
)
def test_what_opens_nothing(server: RunningServer, headers: list[str | bytes]) -> None:
    answer = send(server, f"GET /v1/models?api_key={API_KEY} HTTP/1.1", "Host: x", *headers)
    if b"\0" in repr(headers).encode().replace(b"\\x00", b"\0"):
        assert answer.status == 400
    else:
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    "headers", [[KEY, "Authorization: Bearer wrong"], ["Authorization: Basic eA==", KEY], ["x-api-key: wrong", KEY]]
)
def test_one_valid_key_among_several_is_enough(server: RunningServer, headers: list[str]) -> None:
    assert send(server, "GET /v1/models HTTP/1.1", "Host: x", *headers).status == 200


# --- without keys: the name that a browser asks for -------------------------------------------------------------------


def test_a_browser_says_one_name(keyless: RunningServer) -> None:
    origin = "Origin: http://localhost:8000"
    assert send(keyless, "GET /v1/models HTTP/1.0", origin).status == 403  # none
    assert send(keyless, "GET /v1/models HTTP/1.1", "Host:", origin).status == 403
    assert send(keyless, "GET /v1/models HTTP/1.1", "Host: localhost", "Host: localhost", origin).status == 400
    assert send(keyless, "GET http://evil.example/v1/models HTTP/1.1", "Host: localhost", origin).status == 404
    assert send(keyless, "GET /v1/models HTTP/1.1", "Host: localhost", origin).status == 200
    for origins in ([origin, "Origin: https://evil.example"], ["Origin: https://evil.example", origin]):
        assert send(keyless, "GET /v1/models HTTP/1.1", "Host: localhost", *origins).status == 403
