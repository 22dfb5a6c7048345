"""Responses of the real engine, which go on from what it has cached."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import ServerProcess

INSTRUCTIONS = "You look after a garden by the river, and answer briefly. " * 30
WATER = {
    "type": "function",
    "name": "water",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"plant": {"enum": ["rose", "oak"]}},
        "required": ["plant"],
        "additionalProperties": False,
    },
}


def answer(server: ServerProcess, **body: object) -> dict[str, Any]:
    fields = {"instructions": INSTRUCTIONS, "tools": [WATER], "max_output_tokens": 120, "seed": 3}
    with server.client() as client:
        response = client.post("/v1/responses", json=fields | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_goes_on_from_what_is_cached(real_server: ServerProcess, stored: bool) -> None:
    lines = len(real_server.log)
    question = {"role": "user", "content": f"What do you do at {'noon' if stored else 'night'}?"}
    first = answer(real_server, input=[question], tools=[], store=stored, max_output_tokens=16)
    go_on(real_server, first, [question], {"role": "user", "content": "And then?"}, tools=[], max_output_tokens=1)
    assert not [line for line in real_server.log[lines:] if "The prompt differs" in line]


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_with_thoughts_and_calls(thinking_server: ServerProcess, stored: bool) -> None:
    lines = len(thinking_server.log)
    question = {"role": "user", "content": "What do you do?"}
    fields = {"tool_choice": "required", "reasoning_budget_tokens": 8, "include": ["reasoning.encrypted_content"]}
    first = answer(thinking_server, input=[question], store=stored, **fields)
    thought, *_, call = first["output"]
    assert (thought["type"], call["type"]) == ("reasoning", "function_call")
    assert json.loads(call["arguments"])["plant"] in ("rose", "oak")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It grows."}
    go_on(thinking_server, first, [question], result, max_output_tokens=1)
    assert not [line for line in thinking_server.log[lines:] if "The prompt differs" in line]


def go_on(
    server: ServerProcess, first: dict[str, Any], given: list[dict[str, Any]], then: dict[str, Any], **fields: object
) -> None:
    if first["store"]:
        second = answer(server, input=[then], previous_response_id=first["id"], **fields)
    else:
        second = answer(server, input=[*given, *first["output"], then], store=False, **fields)
    tokens = first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens"] > tokens
    # On recurrent layers as far as the last full page of the first prompt, where their state was kept.
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= tokens // 256 * 256 > 0


def test_a_shape_that_the_engine_enforces(real_server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    [message] = answer(real_server, input="Count.", tools=[], text={"format": form})["output"]
    assert json.loads(message["content"][0]["text"])["n"] in (1, 2)


@pytest.mark.slow
def test_the_pattern_of_a_tool_that_takes_a_text(real_server: ServerProcess) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "(red|blue) \\d"}
    tool = {"type": "custom", "name": "paint", "format": form}
    [call] = answer(real_server, input="Paint.", tools=[tool], tool_choice="required")["output"]
    assert call["type"] == "custom_tool_call"
    assert call["input"] in [f"{colour} {digit}" for colour in ("red", "blue") for digit in range(10)]
