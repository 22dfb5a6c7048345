from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from loguru import logger

from tests.endpoints.running import RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}")
    yield lines
    logger.remove(sink)


def test_requests_are_logged_with_their_outcome_and_probes_are_not(server: RunningServer, log: list[str]) -> None:
    server.anonymous.get("/health")
    server.anonymous.get("/v1/models?api_key=secret")
    outcomes = ("INFO GET '/v1/models': 401 in", "DEBUG GET '/health': 200 in")
    eventually(lambda: all(any(line.startswith(outcome) for line in log) for outcome in outcomes))
    assert not any("secret" in line for line in log)


def test_a_long_path_does_not_fill_the_log(server: RunningServer, log: list[str]) -> None:
    assert server.anonymous.get("/" + "x" * 30_000).status_code == 404
    eventually(lambda: any("xxx': 404 in" in line for line in log))
    assert max(map(len, log)) < 300


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    return server.anonymous.options(
        "/v1/model/load",
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type, x-st-anything",
        },
    )


def test_every_response_has_an_id_of_its_own(server: RunningServer) -> None:
    ids = {
        server.anonymous.get(path).headers["X-Request-Id"] for path in ("/health", "/health", "/nothing", "/v1/model")
    }
    assert len(ids) == 4
    assert all(len(identity) == 32 for identity in ids)


@pytest.mark.parametrize(("given", "kept"), [("trace-1:a.b_C", True), ("x" * 129, False), ("line feed?", False)])
def test_a_clients_id_is_kept_where_it_is_fit_for_a_log(server: RunningServer, given: str, kept: bool) -> None:
    response = server.anonymous.get("/health", headers={"X-Request-Id": given})
    assert (response.headers["X-Request-Id"] == given) == kept


@pytest.mark.parametrize(
    "origin", ["http://localhost:8000", "http://127.0.0.1:1", "https://[::1]:443", "http://localhost"]
)
def test_pages_of_this_machine_may_send_keys(server: RunningServer, origin: str) -> None:
    response = preflight(server, origin)
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] == origin
    assert response.headers["Access-Control-Allow-Credentials"] == "true"
    assert "x-st-anything" in response.headers["Access-Control-Allow-Headers"]
    assert server.http.get("/v1/models", headers={"Origin": origin}).headers["Access-Control-Allow-Origin"] == origin


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil:80"]
)
def test_a_refused_page_is_logged_with_the_setting(server: RunningServer, origin: str, log: list[str]) -> None:
    response = preflight(server, origin)
    assert response.status_code == 400
    assert "Access-Control-Allow-Origin" not in response.headers
    assert any("network.cors_origins" in line and origin in line and line.startswith("WARNING") for line in log)


def test_a_star_opens_without_credentials(scripted: ScriptedEngine) -> None:
    with running_server(scripted, network={"cors_origins": ["*"]}).running() as server:
        response = preflight(server, "https://anywhere.example")
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in response.headers


def test_origins_by_name(scripted: ScriptedEngine) -> None:
    with running_server(scripted, network={"cors_origins": ["https://chat.example"]}).running() as server:
        assert preflight(server, "https://chat.example").status_code == 200
        assert preflight(server, "http://localhost:8000").status_code == 400


def test_errors_can_be_read_by_pages(server: RunningServer) -> None:
    response = server.anonymous.get("/v1/models", headers={"Origin": "http://localhost:8000"})
    assert response.status_code == 401
    assert response.headers["Access-Control-Allow-Origin"] == "http://localhost:8000"
