from __future__ import annotations

import pytest

from common.config_models import Settings
from endpoints.routing import VERSION_PREFIX, Level, RouteAccess, route_table
from endpoints.server import create_app
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, running_server
from tests.scripted import ScriptedEngine

DOCUMENTATION = {"/docs", "/openapi.json"}
OPEN = {
    *("/health", "/ping", "/ready", "/version", "/.well-known/serviceinfo", "/", "/api/version", "/api/extra/version"),
    *(
        f"/api/{version}/{what}"
        for version in ("v1", "latest")
        for what in ("info/version", "config/soft_prompt", "config/soft_prompts_list")
    ),
}
ADMIN = {
    *("/v1/model/load", "/v1/model/unload", "/v1/template/switch", "/v1/template/unload"),
    *("/v1/sampling/override/switch", "/v1/sampling/override/unload"),
    *("/v1/cache/flush", "/v1/cache/clear"),
    *("/v1/lora/load", "/v1/lora/unload", "/v1/model/embedding/load", "/v1/model/embedding/unload"),
    *("/v1/download", "/v1/downloads", "/v1/downloads/{repo_type}/{folder_name}"),
}

ALLOWED: dict[Level, list[str | None]] = {
    "none": [None, API_KEY, ADMIN_KEY],
    "api": [API_KEY, ADMIN_KEY],
    "admin": [ADMIN_KEY],
}


def expected_level(row: RouteAccess) -> str:
    path = VERSION_PREFIX + row.path if row.alias else row.path
    return "none" if path in OPEN else "admin" if path in ADMIN else "api"


def test_table_holds_every_route_with_its_level(scripted: ScriptedEngine) -> None:
    app = create_app(Settings(), scripted.manager(), None)
    table = route_table(app)
    documented = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    # The document has /v1/models/{model_id} without the convertor.
    listed = {
        (row.method, row.path.replace(":path", ""))
        for row in table
        if row.path not in DOCUMENTATION and row.method != "HEAD" and not row.alias
    }
    assert listed == documented
    assert {row.path for row in table} >= OPEN | ADMIN
    assert all(row.level == expected_level(row) for row in table)


def test_every_route_below_v1_is_there_without_v1_too(scripted: ScriptedEngine) -> None:
    table = route_table(create_app(Settings(), scripted.manager(), None))
    versioned = {(row.method, row.path) for row in table if row.path.startswith("/v1/")}
    aliases = {(row.method, row.path) for row in table if row.alias}
    assert {(method, VERSION_PREFIX + path) for method, path in aliases} == versioned
    assert len(table) == len({(row.method, row.path) for row in table})


def test_every_route_enforces_its_level(server: RunningServer) -> None:
    for row in route_table(create_app(Settings(), server.manager, None)):
        path = row.path.replace("{model_id:path}", "alpha")
        # A broken body: whoever is let in gets no further, and a load or unload does not happen.
        allowed = ALLOWED[row.level]
        for key in (None, API_KEY, ADMIN_KEY):
            if path.endswith(("/unload", "/events")) and key in allowed:  # needs no body, or does not end
                continue
            response = server.anonymous.request(
                row.method, path, content=b"{", headers={"Authorization": f"Bearer {key}"} if key else {}
            )
            assert (response.status_code != 401) == (key in allowed), (row, key, response.status_code)


def test_keys_are_checked_before_the_body_is_read(server: RunningServer) -> None:
    response = server.anonymous.post(
        "/v1/completions", content=b"{broken", headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("header", ["x-api-key", "x-admin-key"])
def test_tabbys_key_headers(server: RunningServer, header: str) -> None:
    response = server.anonymous.get("/v1/auth/permission", headers={header: ADMIN_KEY})
    assert response.json() == {"permission": "admin"}


def test_permission_says_what_a_key_may_do(server: RunningServer) -> None:
    assert server.http.get("/v1/auth/permission").json() == {"permission": "api"}
    assert server.admin.get("/v1/auth/permission").json() == {"permission": "admin"}


def test_half_a_surrogate_pair_is_replaced(server: RunningServer) -> None:
    body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}], "stream": %s}'
    for stream in (b"false", b"true"):
        response = server.http.post(
            "/v1/chat/completions", content=body % stream, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 200
        assert "cut ?" in str(server.engine.history()[-1].prompt)
        assert "\\ud83d" not in response.text


def test_whole_surrogate_pairs_stay(server: RunningServer) -> None:
    content = rb'{"prompt": "smile \ud83d\ude00 cut \ud83d"}'
    assert server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}).is_success
    assert server.engine.history()[-1].prompt == "smile 😀 cut ?"


def test_a_route_without_v1_is_the_same_route(server: RunningServer) -> None:
    for path in ("/models", "/model", "/auth/permission"):
        assert server.http.get(path).json() == server.http.get("/v1" + path).json()
    assert server.http.post("/completions", json={"prompt": "x"}).json()["object"] == "text_completion"
    error = server.http.post("/chat/completions", json={}).json()
    assert set(error) == {"error"}  # OpenAI's envelope, not TabbyAPI's
    assert server.http.post("/token/decode", json={}).json()["detail"] == "tokens is missing."


def test_disabled_auth_serves_everybody_as_administrator(scripted: ScriptedEngine) -> None:
    with running_server(scripted, auth=False).running() as server:
        assert server.anonymous.get("/v1/auth/permission").json() == {"permission": "admin"}
