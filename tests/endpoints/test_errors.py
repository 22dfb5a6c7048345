from __future__ import annotations

import http.client
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from common.config_models import Settings
from common.errors import ModelNotLoaded, ServerError
from endpoints.errors import to_server_error
from endpoints.routing import RouteAccess, route_table
from endpoints.server import create_app
from tests.endpoints.running import API_KEY, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

HI = {"messages": [{"role": "user", "content": "hi"}]}
# Where it lies, and how it is made.
SECRETS_OF_THE_SERVER = (str(Path(__file__).parents[2]), tempfile.gettempdir() + os.sep, "site-packages", "Traceback")


def post(server: RunningServer, path: str, body: object) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 99}, "temperature", "temperature should be less than or equal to 10, not 99"),
        ({"top_p": "x"}, "top_p", 'not "x"'),
        ({"n": 0}, "n", "greater than or equal to 1, not 0"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20, not 21"),
        ({"stop": [-1]}, "stop", "must be a string, or a list of strings and token ids"),
        ({"stop": {"a": 1}}, "stop", "must be a string, or a list of strings and token ids"),
        ({"min_tokens": 50, "max_tokens": 10}, "min_tokens", "min_tokens (50) must not be larger than max_tokens (10)"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
        ({"messages": []}, "messages", "messages should have at least 1 item, not []."),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages.0.content",
            "a string or a list of content parts, not 7",
        ),
        ({"messages": [{"role": "user", "content": [{"text": 7}]}]}, "messages.0.content.0.text", "string, not 7"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": ""}}},
            "tool_choice.function.name",
            'tool_choice.function.name should have at least 1 character, not "".',
        ),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ],
)
def test_a_refusal_names_the_field(server: RunningServer, fields: dict[str, object], param: str, said: str) -> None:
    error = post(server, "/v1/chat/completions", HI | fields)
    assert error["param"] == param
    assert said in error["message"]


def test_broken_json_is_told_with_its_place(server: RunningServer) -> None:
    response = server.http.post(
        "/v1/completions", content=b'{"prompt": "x",}', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]
    assert "character 15" in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b'{"prompt": "\xff"}', b'{"prompt": "x", "max_tokens": ' + b"1" * 5000 + b"}"])
def test_a_body_that_json_cannot_read(server: RunningServer, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "cannot be read as JSON" in response.json()["error"]["message"]


def test_a_token_id_that_no_model_has(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": [10**30]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("content", [b"", b"[1]", b'"text"', b"null"])
def test_a_body_that_is_no_object(server: RunningServer, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_declared_as_json(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_unknown_routes_and_methods_have_the_envelope(server: RunningServer) -> None:
    unknown, wrong = server.http.get("/v1/nothing"), server.http.get("/v1/completions")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1", "/api", "/nothing", "/v1/completions/more", "/v1/models/..%2f..%2fx", "/%00"])
def test_unknown_paths(server: RunningServer, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 404
    assert_envelope(response)


@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "HEAD", "X-OWN"])
@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/model/unload", "GET, POST"), ("/model/unload", "GET, POST"), ("/v1/chat/completions", "POST")],
)
def test_a_wrong_method_is_told_all_right_ones(server: RunningServer, method: str, path: str, allowed: str) -> None:
    response = server.http.request(method, path)
    assert (response.status_code, response.headers["Allow"]) == (405, allowed)
    if method != "HEAD":
        assert_envelope(response)


# --- every route ------------------------------------------------------------------------------------------------------

NO_OBJECTS = {
    "empty": b"",
    "null": b"null",
    "list": b"[1]",
    "text": b'"text"',
    "broken": b'{"prompt": ',
    "no UTF-8": b'{"prompt": "\xff"}',
    "deep list": b"[" * 100_000,
    "deep object": b'{"messages":' * 100_000,
}
WRONG_VALUES = [{"a": {"b": []}}, [[[]]], True, 1e300, -(10**30), "", "\x00"]


def routes() -> list[RouteAccess]:
    table = route_table(create_app(Settings(), ScriptedEngine(Path()).manager(), None))
    return [row for row in table if not row.path.endswith("/events")]  # which do not end


def fields_of_routes() -> dict[str, list[str]]:
    """Names of the fields that the body of a route has, by path."""
    document = create_app(Settings(), ScriptedEngine(Path()).manager(), None).openapi()
    found = {}
    for path, methods in document["paths"].items():
        reference = str(methods.get("post", {}).get("requestBody"))
        name = re.search(r"#/components/schemas/(\w+)", reference)
        if name is not None:
            found[path] = list(document["components"]["schemas"][name[1]]["properties"])
    return found


def ask(server: RunningServer, row: RouteAccess, content: bytes) -> httpx.Response:
    path = row.path.replace("{model_id:path}", "none-such")
    return server.admin.request(row.method, path, content=content, headers={"Content-Type": "application/json"})


def assert_honest(response: httpx.Response, *, loaded: bool) -> None:
    """No route fails over what a client sends, and every refusal can be read.

    Args:
        loaded: there is a model that generates. None that embeds is.
    """
    loaded = loaded and not re.search("embed|rerank", response.request.url.path)
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert_envelope(response)
        if response.status_code >= 500:
            assert response.status_code == ModelNotLoaded.status
            assert has_own_envelope(response) or response.json()["error"]["code"] == ModelNotLoaded.code
    assert response.status_code < 500 or not loaded


def has_own_envelope(response: httpx.Response) -> bool:
    """Whether the route's API is neither OpenAI's nor TabbyAPI's: its own tests say what its errors look like."""
    path = response.request.url.path
    return path.startswith("/api/") or "/messages" in path


def assert_envelope(response: httpx.Response) -> None:
    assert response.headers["Content-Type"] == "application/json"
    assert not any(secret in response.text for secret in SECRETS_OF_THE_SERVER)
    body = response.json()
    if has_own_envelope(response):
        assert body["error"]
        return
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert set(body) <= {"error", "detail"}
    assert body.get("detail", body["error"]["message"]) == body["error"]["message"]


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_no_route_fails_over_a_body(server: RunningServer, content: bytes) -> None:
    for row in routes():
        # These need no body, and would succeed.
        if not row.path.endswith(("/unload", "/flush", "/clear", "/check", "/abort", "/cancel")):
            response = ask(server, row, content)
            assert response.request.method != "POST" or response.status_code == 400, row
            assert_honest(response, loaded=True)


def test_no_route_fails_over_a_value(server: RunningServer) -> None:
    fields = fields_of_routes()
    assert len(fields) > 8
    for path, names in fields.items():
        for value in WRONG_VALUES:
            response = server.admin.post(path, json=dict.fromkeys(names, value))
            assert_honest(response, loaded=True)


def test_no_route_fails_without_a_model(empty_server: RunningServer) -> None:
    for row in routes():
        assert_honest(ask(empty_server, row, b""), loaded=False)


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"x-api-key": ""}]
)
def test_every_route_refuses_strangers_in_the_same_way(server: RunningServer, header: dict[str, str]) -> None:
    for row in routes():
        response = server.anonymous.request(row.method, row.path, headers=header)
        if row.level != "none":
            assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            if row.method != "HEAD":
                assert_envelope(response)


# --- size -------------------------------------------------------------------------------------------------------------

MEGABYTE = b" " * 1024 * 1024


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Takes bodies of 1 MB."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("small"))
    engine.add_model("alpha")
    engine.write(Script())
    with running_server(engine, network={"max_body_mb": 1}).running() as running:
        yield running


def refused_for_its_size(response: httpx.Response) -> bool:
    assert_envelope(response)
    error = response.json()["error"]
    too_large = (413, "request_too_large", True)
    return (response.status_code, error["code"], "network.max_body_mb" in error["message"]) == too_large


def test_a_body_that_is_too_large(small_server: RunningServer) -> None:
    for path in ("/v1/completions", "/v1/token/encode"):
        for content in (MEGABYTE + b" ", iter([MEGABYTE, b" "])):  # with its length, and in chunks
            assert refused_for_its_size(small_server.http.post(path, content=content))
    assert "detail" not in small_server.http.post("/v1/completions", content=MEGABYTE + b" ").json()
    assert small_server.http.post("/v1/completions", content=MEGABYTE).status_code == 400
    assert small_server.anonymous.post("/v1/completions", content=MEGABYTE + b" ").status_code == 401


def test_a_connection_outlives_a_body_that_is_too_large(small_server: RunningServer) -> None:
    url = httpx.URL(small_server.base_url)
    connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=30)
    try:
        connection.connect()
        opened = connection.sock
        for _ in range(2):
            connection.request("POST", "/v1/completions", MEGABYTE * 8, {"Authorization": f"Bearer {API_KEY}"})
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (413, True)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        assert connection.sock is opened
    finally:
        connection.close()


def test_a_length_that_is_too_large_is_refused_before_the_body_comes(small_server: RunningServer) -> None:
    url = httpx.URL(small_server.base_url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {API_KEY}\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_no_limit(scripted: ScriptedEngine) -> None:
    app = create_app(Settings.model_validate({"network": {"max_body_mb": 0}}), scripted.manager(), None)
    assert "BodyLimitMiddleware" not in str(app.user_middleware)


# --- the unexpected ---------------------------------------------------------------------------------------------------


def test_a_status_of_the_framework_stays() -> None:
    for status, kind in ((429, "invalid_request_error"), (501, "server_error")):
        error = to_server_error(HTTPException(status, "because"))
        assert (error.status, error.type, error.message) == (status, kind, "because")
    assert ServerError.status == 500


def test_a_failure_outside_of_the_routes(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def explode(*args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("endpoints.middleware.BodyLimitMiddleware.__call__", explode)
    response = server.http.get("/v1/models", headers={"X-Request-Id": "find-me", "Origin": "http://localhost"})
    assert response.status_code == 500
    assert_envelope(response)
    assert "secret" not in response.text
    assert "find-me" in response.json()["detail"]
    assert response.headers["Access-Control-Allow-Origin"] == "http://localhost"


def test_tabbys_own_routes_repeat_the_message_as_detail(server: RunningServer) -> None:
    body = server.admin.post("/v1/model/load", json={"model_name": "gamma"}).json()
    assert body["detail"] == body["error"]["message"]
    assert "detail" not in server.http.post("/v1/completions", json={}).json()


def test_a_server_error_says_when_to_try_again(empty_server: RunningServer) -> None:
    response = empty_server.http.post("/v1/chat/completions", json=HI | {"model": "gpt-4o"})
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "5"
    assert response.json()["error"]["code"] == "model_not_loaded"


def test_the_unexpected_is_told_without_details(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("endpoints.OAI.router.new_envelope", explode)
    response = server.http.post("/v1/chat/completions", json=HI, headers={"X-Request-Id": "find-me"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "find-me" in response.json()["error"]["message"]
    assert response.headers["X-Request-Id"] == "find-me"


def test_an_engine_failure_of_one_request_is_an_error_response(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "FAIL"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"
