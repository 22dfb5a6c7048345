"""A real model that is made to call tools, which it has not learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ServerProcess, served

pytestmark = pytest.mark.slow

PAGE = 256  # tokens
LIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(
        tmp_path_factory.mktemp("server"), "--max-seq-len", "2048", "--cache-size", "2048", model=smollm2
    ) as server:
        yield server


def ask(server: ServerProcess, messages: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    body = {"messages": messages, "tools": [LIGHT, CLOCK], "max_tokens": 80, "temperature": 0, **fields}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


NAMED = {"type": "function", "function": {"name": "set_light"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_asked_for_fits_its_schema(server: ServerProcess, choice: object) -> None:
    question = {"role": "user", "content": "Light in the kitchen, please."}
    [answer] = ask(server, [question], tool_choice=choice, parallel_tool_calls=False)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    arguments = json.loads(call["function"]["arguments"])
    if choice == NAMED:
        assert call["function"]["name"] == "set_light"
    if call["function"]["name"] == "set_light":
        assert arguments.keys() == {"room", "on"}
        assert arguments["room"] in ("kitchen", "hall")
        assert isinstance(arguments["on"], bool)


def test_the_turn_after_a_call_has_only_what_is_new_to_process(server: ServerProcess) -> None:
    question = {"role": "user", "content": "Light in the kitchen, please."}
    while length_of_prompt(server, [question]) % PAGE < PAGE - 12:  # so that the call reaches over the end of a page
        question["content"] += " Dark here."
    first = ask(server, [question], tool_choice=NAMED)
    usage = first["usage"]
    processed = usage["total_tokens"] - 1  # the last token of an answer is not
    assert usage["prompt_tokens"] // PAGE < processed // PAGE
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    call["function"]["arguments"] = json.loads(call["function"]["arguments"])  # as clients may send it back
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    usage = ask(server, [question, message, result], max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= processed // PAGE * PAGE


def length_of_prompt(server: ServerProcess, messages: list[dict[str, Any]]) -> int:
    body = {"messages": messages, "tools": [LIGHT, CLOCK], "add_generation_prompt": True}
    with server.client() as client:
        return int(client.post("/v1/token/encode", json=body).json()["length"])
