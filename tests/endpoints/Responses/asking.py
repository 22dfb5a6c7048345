"""Requests of the Responses API and what comes back."""

from __future__ import annotations

import json
from typing import Any

from httpx import Response

from tests.endpoints.running import RunningServer

LS = {"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


def ask(server: RunningServer, given: object, **fields: object) -> dict[str, Any]:
    response = server.http.post("/v1/responses", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(server: RunningServer, **body: object) -> dict[str, Any]:
    """The error of a request that cannot be served."""
    response = server.http.post("/v1/responses", json=body)
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(server: RunningServer, given: object, **fields: object) -> list[dict[str, Any]]:
    """The events of a stream."""
    response = server.http.post("/v1/responses", json={"input": given, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response)


def events(response: Response) -> list[dict[str, Any]]:
    found = []
    for frame in response.text.replace("\r\n", "\n").strip().split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompts(server: RunningServer) -> list[str]:
    """All that the engine was asked."""
    return [request.prompt for request in server.engine.history() if isinstance(request.prompt, str)]
