"""Requests that ask for more than a server should do: each is refused with the field at fault, and hurts nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common import limits
from tests.endpoints.running import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LLAMA = "/completion"
HI = [{"role": "user", "content": "COUNT"}]
HUGE = 10**30
NESTED: Any = json.loads('{"a":' * 90 + "1" + "}" * 90)


def tool(name: str, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "function": {"name": "f", "arguments": "{}"}}


TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    # Answers
    (TEXT, {"prompt": "hi", "n": 129}, "n"),
    (TEXT, {"prompt": "hi", "n": HUGE}, "n"),
    (TEXT, {"prompt": "hi", "best_of": 129}, "best_of"),
    (TEXT, {"prompt": ["hi"] * 129}, "prompt"),
    (TEXT, {"prompt": ["hi"] * 65, "n": 2}, "n"),
    (TEXT, {"prompt": ["hi"] * 65, "best_of": 2}, "best_of"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (LLAMA, {"prompt": ["hi"] * 65, "n": 2}, "n"),
    (LLAMA, {"prompt": ["hi"] * 129}, "prompt"),
    (LLAMA, {"prompt": [1, "a"] * 257}, "prompt"),
    (LLAMA, {"prompt": [[1, "a"] * 129, [1, "a"] * 129]}, "prompt"),
    (CHAT, {"messages": HI, "n": 129}, "n"),
    # What every token is compared with
    (CHAT, {"messages": HI, "stop": ["x"] * 257}, "stop"),
    (CHAT, {"messages": HI, "stop": "x" * 1001}, "stop.0"),
    (CHAT, {"messages": HI, "stop_token_ids": [1] * 257}, "stop_token_ids"),
    (CHAT, {"messages": HI, "stop_token_ids": ["x"] * 100_000}, "stop_token_ids.0"),
    (CHAT, {"messages": HI, "banned_strings": ["x"] * 2001}, "banned_strings"),
    (CHAT, {"messages": HI, "banned_strings": ["x" * 1001]}, "banned_strings.0"),
    (CHAT, {"messages": HI, "dry_sequence_breakers": ["x"] * 257}, "dry_sequence_breakers"),
    (CHAT, {"messages": HI, "dry_sequence_breakers": json.dumps(["x"] * 257)}, "dry_sequence_breakers"),
    (CHAT, {"messages": HI, "banned_tokens": [1] * 100_001}, "banned_tokens"),
    (CHAT, {"messages": HI, "banned_tokens": "1," * 100_001}, "banned_tokens"),
    (CHAT, {"messages": HI, "allowed_tokens": [1] * 100_001}, "allowed_tokens"),
    (CHAT, {"messages": HI, "logit_bias": {str(number): 1 for number in range(20_001)}}, "logit_bias"),
    (LLAMA, {"prompt": "hi", "logit_bias": {f"t{number}": 1 for number in range(257)}}, "logit_bias"),
    (LLAMA, {"prompt": "hi", "logit_bias": [[number, 1] for number in range(20_001)]}, "logit_bias"),
    (CHAT, {"messages": HI, "loop_detect_window": 10_001}, "loop_detect_window"),
    # Numbers
    (CHAT, {"messages": HI, "max_tokens": HUGE}, "max_tokens"),
    (CHAT, {"messages": HI, "min_tokens": HUGE}, "min_tokens"),
    (CHAT, {"messages": HI, "seed": HUGE}, "seed"),
    (CHAT, {"messages": HI, "seed": -HUGE}, "seed"),
    (CHAT, {"messages": HI, "top_k": HUGE}, "top_k"),
    (CHAT, {"messages": HI, "temperature": 1e308}, "temperature"),
    (CHAT, {"messages": HI, "repetition_penalty": 1e308}, "repetition_penalty"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "thinking": {"budget_tokens": HUGE}}, "thinking.budget_tokens"),
    (TEXT, {"prompt": [HUGE]}, "prompt"),
    (TEXT, {"prompt": "hi", "logprobs": HUGE}, "logprobs"),
    # Conversations
    (CHAT, {"messages": HI * 10_001}, "messages"),
    (CHAT, {"messages": [7] * 100_000}, "messages.0"),
    (CHAT, {"messages": [{"content": [{"text": "x"}] * 1001}]}, "messages.0.content"),
    (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": "data:,"}] * 65}]}, "messages"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [call(1)] * 1001}]}, "messages.1.tool_calls"),
    (CHAT, {"messages": HI, "tools": [tool(f"t{number}") for number in range(1001)]}, "tools"),
    (CHAT, {"messages": HI, "functions": [{"name": f"t{number}"} for number in range(1001)]}, "functions"),
    (CHAT, {"messages": HI, "cache_boundaries": [0] * 17}, "cache_boundaries"),
    (CHAT, {"messages": HI, "cache_boundaries": [HUGE]}, "cache_boundaries.0"),
    (CHAT, {"messages": HI, "reasoning_budget_message": "x" * 1001}, "reasoning_budget_message"),
    # Constraints
    (CHAT, {"messages": HI, "guided_choice": ["x"] * 10_001}, "guided_choice"),
    (CHAT, {"messages": HI, "guided_regex": "x" * 300_000}, "guided_regex"),
    (CHAT, {"messages": HI, "guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
    (CHAT, {"messages": HI, "modalities": ["text"] * 65}, "modalities"),
    # Lists of names
    (LLAMA, {"prompt": "hi", "samplers": ["top_k"] * 65}, "samplers"),
    (LLAMA, {"prompt": "hi", "response_fields": ["x"] * 65}, "response_fields"),
    (LLAMA, {"prompt": "hi", "response_fields": ["x/" * 501]}, "response_fields.0"),
    (LLAMA, {"prompt": "hi", "lora": [{"id": 0, "scale": 0}] * 65}, "lora"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x"}] * 1001}, "input_extra"),
    # Texts that no tokens of the model can hold
    (CHAT, {"messages": [{"content": "x" * 300_000}]}, "messages"),
    (TEXT, {"prompt": "x" * 300_000}, "prompt"),
    (TEXT, {"prompt": ["hi", "x" * 300_000]}, "prompt"),
    (LLAMA, {"prompt": [1, "x" * 300_000]}, "prompt"),
    ("/apply-template", {"messages": [{"content": "x" * 300_000}]}, "messages"),
    ("/v1/cache/explain", {"prompt": "x" * 300_000}, "prompt"),
    ("/tokenize", {"content": "x" * 4_000_001}, "content"),
    ("/v1/token/encode", {"text": "x" * 4_000_001}, "text"),
    # Tokens and explanations
    ("/detokenize", {"tokens": [-1] * 100_000}, "tokens.0"),
    ("/v1/token/decode", {"tokens": [HUGE]}, "tokens.0"),
    ("/tokenize", {"messages": HI * 10_001}, "messages"),
    ("/v1/cache/explain", {"messages": HI * 10_001}, "messages"),
    ("/apply-template", {"messages": HI * 10_001}, "messages"),
]


def assert_serves(server: RunningServer) -> None:
    response = server.http.post(CHAT, json={"messages": HI})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "one two three"


@pytest.mark.parametrize(("path", "body", "param"), TOO_MUCH, ids=[f"{path}-{param}" for path, _, param in TOO_MUCH])
def test_asking_for_too_much_is_refused_with_the_field(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert len(error["message"]) < 500
    assert_serves(server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "n": 128}),
        (CHAT, {"messages": HI, "stop": ["x" * 1000] * 256}),
        (CHAT, {"messages": HI, "banned_strings": ["x"] * 2000}),
        (CHAT, {"messages": HI, "seed": 2**63 - 1, "n": 3}),
        (CHAT, {"messages": HI, "seed": -(2**63)}),
        (CHAT, {"messages": HI, "template_vars": {"deep": NESTED}}),
        (CHAT, {"messages": HI, "template_vars": {"namespace": 1, "range": 2, "messages": 3, "": 4, "a b": 5}}),
        (CHAT, {"messages": HI, "tools": [tool("f", parameters=NESTED)]}),
        (CHAT, {"messages": HI, "mirostat_mode": HUGE, "num_beams": HUGE, "tfs": 1e308}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "COUNT \0 \ud83d", "name": "\0"}], "user": "\0", "stop": "\0"},
        ),
        (TEXT, {"prompt": "COUNT \0", "suffix": None, "stop": ["\0"], "banned_strings": ["\0"]}),
        (TEXT, {"prompt": ["COUNT"] * 64, "n": 2}),
        ("/apply-template", {"messages": HI * 3000}),
    ],
    ids=str,
)
def test_unusual_requests_within_the_limits_are_served(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    assert_serves(server)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"messages":' + b"[" * 201 + b"]" * 201 + b"}", "nested too deeply"),
        (
            b'{"messages":[{"role":"user","content":"hi"}],"template_vars":' + b'{"a":' * 300 + b"1" + b"}" * 301,
            "nested too deeply",
        ),
        (b'{"a":[' + b"{}," * limits.MAX_BODY_MARKS + b"{}]}", "commas and opening brackets"),
        (json.dumps({"messages": [{"content": [{"text": "x"}] * 1000}] * 100}).encode(), "lists and objects"),
        (b'{"max_tokens":' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"temperature": 1e999, "messages": [{"content": "hi"}]}', "temperature"),
        (b'{"temperature": NaN, "messages": [{"content": "hi"}]}', "temperature"),
        (b'{"messages": "\xff"}', "cannot be read as JSON"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_bodies_that_are_costly_to_walk_are_refused(server: RunningServer, body: bytes, said: str) -> None:
    response = server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    assert_serves(server)
