"""Over HTTP, on the real engine: an edit costs what it must, and the server can tell why. All counts are exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from tests.models import corpus
from tests.serving import ServerProcess, served

PAGE = 256
CHUNK = 512
CALLS = 30
CHAT_TOKENS = 5000
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}

Messages: TypeAlias = list[dict[str, Any]]
Body: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def server(tiny_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With room for few checkpoints: 17 of this model."""
    options = ("--chunk-size", str(CHUNK), "--recurrent-dtype", "fp32", "--sysmem-recurrent-cache", "1")
    with served(tmp_path_factory.mktemp("checkpoints"), *options, model=tiny_hybrid) as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """An administrator of a server that has nothing cached."""
    with server.client(server.admin_key) as client:
        assert client.post("/v1/cache/clear").status_code == 200
        yield client


# --- chats ----------------------------------------------------------------------------------------------------------


class Writer:
    """Gives another text each time."""

    def __init__(self, seed: int = 0) -> None:
        self._lines = list(corpus())[seed * 100 :]

    def text(self, lines: int) -> str:
        """About 26 tokens a line."""
        taken, self._lines = self._lines[:lines], self._lines[lines:]
        return "".join(taken)


def long_chat(turns: int, seed: int = 0) -> Messages:
    writer = Writer(seed)
    messages: Messages = [{"role": "system", "content": writer.text(56)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": writer.text(6)})
        messages.append({"role": "assistant", "content": writer.text(12)})
    return [*messages, {"role": "user", "content": writer.text(6)}]


def with_edit(messages: Messages, index: int, word: str = "Edited: ") -> Messages:
    """With a word put at the beginning of a message."""
    edited = [dict(message) for message in messages]
    edited[index]["content"] = word + edited[index]["content"]
    return edited


def chat(messages: Messages, **fields: Any) -> Body:
    return {"messages": messages, "max_tokens": 1, "temperature": 0, **fields}


def complete(http: httpx.Client, body: Body) -> Body:
    """The usage figures of a chat completion."""
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage: Body = response.json()["usage"]
    return usage


def processed(usage: Body) -> int:
    """Tokens that went through prefill; the last one of a prompt never does."""
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] - 1)


def tokens(http: httpx.Client, body: Body) -> list[int]:
    """Of the prompt."""
    prompt = http.post("/apply-template", json=body).json()["prompt"]
    encoded: list[int] = http.post("/v1/token/encode", json={"text": prompt, "add_bos_token": False}).json()["tokens"]
    return encoded


def first_difference(http: httpx.Client, one: Body, other: Body) -> int:
    pairs = zip(tokens(http, one), tokens(http, other), strict=False)
    return next(index for index, (a, b) in enumerate(pairs) if a != b)


def page(position: int) -> int:
    return position // PAGE * PAGE


def checkpoints(http: httpx.Client) -> Body:
    held: Body = http.get("/v1/cache").json()["checkpoints"]
    return held


# --- edits ----------------------------------------------------------------------------------------------------------


def test_an_edit_at_a_boundary_costs_what_follows_it(http: httpx.Client) -> None:
    messages = long_chat(turns=8)
    original = chat(messages)
    length = complete(http, original)["prompt_tokens"]
    assert length >= CHAT_TOKENS
    edits = {index: chat(with_edit(messages, index)) for index in (-1, -3, 1)}
    positions = {index: first_difference(http, original, body) for index, body in edits.items()}

    entries = checkpoints(http)["entries"]
    assert sorted(entry["position"] for entry in entries) == sorted(
        {*(page(position) for position in positions.values()), page(length - 1)}
    )
    assert len(entries) <= 4
    assert {entry["position"] for entry in entries if entry["boundary"]} >= {page(positions[-3]), page(positions[1])}

    for index, body in edits.items():
        usage = complete(http, body)
        floor = usage["prompt_tokens"] - 1 - page(positions[index])
        assert floor <= processed(usage) <= floor + PAGE, index


def test_explain_tells_what_then_happens(http: httpx.Client) -> None:
    messages = long_chat(turns=3)
    complete(http, chat(messages))
    bodies = [
        chat(messages),
        chat(with_edit(messages, -1)),
        chat(with_edit(messages, 2)),
        chat(with_edit(messages, 0)),
        chat([*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]),
        chat([messages[0], {"role": "user", "content": "Something else."}]),
        chat([{"role": "user", "content": "Nothing like it."}]),
    ]
    for body in bodies:
        told = http.post("/v1/cache/explain", json=body).json()
        usage = complete(http, {**body, "explain_cache": True})
        details = usage["prompt_tokens_details"]
        assert details["explanation"] == told
        assert usage["prompt_tokens"] == told["prompt_tokens"] == told["resumed_tokens"] + told["processed_tokens"]
        assert details["cached_tokens"] == told["resumed_tokens"]
        assert details["matched_tokens"] == told["matched_tokens"]
        assert details["replayed_tokens"] == told["replayed_tokens"]


# --- agents ---------------------------------------------------------------------------------------------------------


def test_a_long_tool_loop_leaves_the_system_prompt_cached(http: httpx.Client) -> None:
    writer = Writer(seed=1)
    system = {"role": "system", "content": writer.text(25)}
    messages: Messages = [system, {"role": "user", "content": "Find the bug."}]
    other_chat = chat([system, {"role": "user", "content": "Another task."}], tools=[TOOL])
    end_of_system = first_difference(http, chat(messages, tools=[TOOL]), other_chat)
    evicted_before = checkpoints(http)["evictions"]

    last_length = 1
    for number in range(CALLS):
        usage = complete(http, chat(messages, tools=[TOOL]))
        assert usage["prompt_tokens_details"]["cached_tokens"] >= page(last_length - 1)
        last_length = usage["prompt_tokens"]
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "I look at it.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": writer.text(5)})

    held = checkpoints(http)
    assert held["evictions"] - evicted_before > 0, "nothing had to go"
    assert page(end_of_system) in [entry["position"] for entry in held["entries"] if entry["boundary"]]
    usage = complete(http, other_chat)
    assert usage["prompt_tokens_details"]["cached_tokens"] == page(end_of_system)


# --- a client that goes away ------------------------------------------------------------------------------------------


def test_the_retry_of_a_cancelled_prefill_goes_on(http: httpx.Client) -> None:
    body = {**chat(long_chat(turns=8, seed=2)), "stream": True, "return_progress": True}
    done = 0
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                done = json.loads(line.removeprefix("data: "))["prompt_progress"]["processed"]
                if done >= 4 * CHUNK:
                    break
    while http.get("/v1/cache").json()["active_requests"]:
        pass  # the server notices that the client has gone

    usage = complete(http, {**body, "stream": False})
    assert usage["prompt_tokens"] >= CHAT_TOKENS
    assert page(done) <= usage["prompt_tokens_details"]["cached_tokens"] < page(usage["prompt_tokens"] - 1)
