"""Conversations through Anthropic's API whose prompts the real engine has to find in its cache."""

from __future__ import annotations

from typing import Any

from tests.serving import ServerProcess

LS = {
    "name": "ls",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"enum": ["/srv", "/tmp"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


def ask(server: ServerProcess, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/messages", json={"max_tokens": 300, "messages": messages, **fields})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def prompt_tokens(message: dict[str, Any]) -> int:
    usage = message["usage"]
    return int(usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"])


def test_a_call_after_a_thought_is_the_beginning_of_the_next_turn(thinking_server: ServerProcess) -> None:
    server, lines = thinking_server, len(thinking_server.log)
    fields = {
        "system": "You look into folders. " * 30,
        "tools": [LS],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 60},
    }
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is there?"}]
    first = ask(server, messages, seed=3, **fields)
    thought, call = first["content"]
    assert (thought["type"], call["type"], first["stop_reason"]) == ("thinking", "tool_use", "tool_use")
    assert call["input"]["path"] in ("/srv", "/tmp")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "two files"}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    with server.client() as client:
        counted = client.post("/v1/messages/count_tokens", json={"messages": messages, **fields}).json()
    second = ask(server, messages, max_tokens=1, **fields)
    assert prompt_tokens(second) == counted["input_tokens"]
    # On recurrent layers as far as the last full page of the first prompt, where their state was kept.
    assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(first) // 256 * 256 > 0
    assert not any("differs" in line for line in server.log[lines:])
