"""What `cache_control` keeps of a model with recurrent layers, on the real engine."""

from __future__ import annotations

from typing import Any

from tests.serving import ServerProcess

DOCUMENT = "The river is near the harbour, and the lantern is in the garden. " * 40


def ask(server: ServerProcess, question: str, **mark: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": DOCUMENT, **mark}, {"type": "text", "text": question * 30}]
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    with server.client() as client:
        response = client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def test_a_marked_document_is_processed_once(real_server: ServerProcess) -> None:
    ask(real_server, "Who measured the garden? ", cache_control={"type": "ephemeral"})
    usage = ask(real_server, "What was counted there? ", cache_control={"type": "ephemeral"})
    with real_server.client() as client:
        tokens = client.post("/v1/token/encode", json={"text": DOCUMENT}).json()["length"]
    assert usage["cache_read_input_tokens"] >= tokens // 256 * 256 > 256
