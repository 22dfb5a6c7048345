from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine

PAGES = ("/docs", "/openapi.json")


@pytest.mark.parametrize("path", PAGES)
def test_documentation_needs_a_key(server: RunningServer, path: str) -> None:
    for method in ("GET", "HEAD"):
        refused = server.anonymous.request(method, path)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = server.anonymous.get(path).json()
    assert "network.public_docs" in error["error"]["message"]
    assert error["detail"] == error["error"]["message"]
    for client in (server.http, server.admin):
        assert client.get(path).status_code == 200


def test_the_page_reads_the_description(server: RunningServer) -> None:
    page = server.http.get("/docs")
    assert page.headers["Content-Type"].startswith("text/html")
    assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "url: 'openapi.json'" in page.text
    description = server.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in description["paths"]
    assert "bearer" in description["components"]["securitySchemes"]
    assert not set(description["paths"]) & {*PAGES, "/redoc", "/docs/oauth2-redirect"}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/completion", "/infill", "/v1/model/load"]
)
def test_streams_are_described(server: RunningServer, path: str) -> None:
    operation = server.http.get("/openapi.json").json()["paths"][path]["post"]
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_what_a_client_picks_of_an_answer_is_described(server: RunningServer) -> None:
    """It need not have any member of a whole answer."""
    operation = server.http.get("/openapi.json").json()["paths"]["/completion"]["post"]
    shapes = operation["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
    assert {"type": "object", "additionalProperties": True} in shapes


def test_names_in_paths_are_described(server: RunningServer) -> None:
    for path, operations in server.http.get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            described = {item["name"] for item in operation.get("parameters", []) if item["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)}", path)), path


def test_errors_are_as_described(server: RunningServer) -> None:
    """Each API has an envelope of its own."""
    document = server.http.get("/openapi.json").json()
    envelopes = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["security"]:
                error = server.anonymous.request(method, path)
                assert error.status_code == 401
                described = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
                assert fits(error.json(), described, document), (path, error.text)
                envelopes.add(json.dumps(described, sort_keys=True))
    assert len(envelopes) == 4  # of OpenAI's API and TabbyAPI's, of Anthropic's, Kobold's and Ollama's


def fits(value: object, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """It has the members that the schema asks for, and none that it does not know."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") != "object":
        return not isinstance(value, dict)
    members = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= members.keys()
        and all(fits(value[name], members[name], document) for name in value)
    )


def test_it_can_be_open_to_everybody(scripted: ScriptedEngine) -> None:
    with running_server(scripted, network={"public_docs": True}).running() as server:
        assert [server.anonymous.get(path).status_code for path in PAGES] == [200, 200]
    with running_server(scripted, auth=False).running() as server:
        assert [server.anonymous.head(path).status_code for path in PAGES] == [200, 200]


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
def test_what_is_not_there(server: RunningServer, path: str) -> None:
    assert server.admin.get(path).status_code == 404
