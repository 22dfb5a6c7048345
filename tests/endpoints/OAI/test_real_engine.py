"""Requests whose answers the real engine has to get right."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.endpoints.OAI.test_chat import frames
from tests.serving import ServerProcess

PROMPT = "The quick brown fox"


def complete(server: ServerProcess, **body: object) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(server: ServerProcess, **body: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_equal_seeds_give_equal_texts(real_server: ServerProcess) -> None:
    first, again, other = (
        [choice["text"] for choice in complete(real_server, n=2, seed=seed, temperature=1.5)["choices"]]
        for seed in (7, 7, 9)
    )
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_a_prompt_of_tokens_is_the_same_as_its_text(real_server: ServerProcess) -> None:
    with real_server.client() as client:
        tokens = client.post("/v1/token/encode", json={"text": PROMPT}).json()["tokens"]
    as_text, as_tokens = (complete(real_server, prompt=prompt, temperature=0) for prompt in (PROMPT, tokens))
    assert as_text["choices"] == as_tokens["choices"]
    assert as_text["usage"]["prompt_tokens"] == as_tokens["usage"]["prompt_tokens"] == len(tokens)


def test_logprobs_of_a_prompt_and_its_answer(real_server: ServerProcess) -> None:
    answer = complete(real_server, echo=True, logprobs=3, temperature=0)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    usage = answer["usage"]
    assert choice["text"].startswith(PROMPT)
    assert {len(logprobs[name]) for name in logprobs} == {usage["prompt_tokens"] + usage["completion_tokens"]}
    assert logprobs["token_logprobs"][0] is None
    assert all(-1000 <= value <= 0 and math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    prompt_tokens = usage["prompt_tokens"]
    for token, value, top in zip(*(logprobs[name][prompt_tokens:] for name in list(logprobs)[:3]), strict=True):
        assert value == max(top.values())  # it is greedy
        assert token in top
    assert logprobs["text_offset"][prompt_tokens] == len(PROMPT)


def test_a_prompt_alone_has_the_same_logprobs(real_server: ServerProcess) -> None:
    alone = complete(real_server, echo=True, logprobs=0, max_tokens=0)
    assert alone["choices"][0]["text"] == PROMPT
    assert alone["usage"]["completion_tokens"] == 0
    with_answer = complete(real_server, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    found = alone["choices"][0]["logprobs"]["token_logprobs"]
    assert found[1:] == pytest.approx(with_answer["token_logprobs"][1 : len(found)], abs=0.01)


def test_a_stream_reports_every_token_that_it_counts(real_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 3, "temperature": 2,
            "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    with real_server.client() as client:
        *events, last = frames(client.post("/v1/chat/completions", json=body))
    choices = [event["choices"][0] for event in events]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert len(entries) == last["usage"]["completion_tokens"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace") == text


def test_the_most_likely_of_several(real_server: ServerProcess) -> None:
    fields = {"seed": 5, "temperature": 2.0, "logprobs": 0, "max_tokens": 4}
    several = complete(real_server, n=3, **fields)["choices"]
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])
        for choice in several
        if choice["logprobs"]
    }
    [best] = complete(real_server, best_of=3, **fields)["choices"]
    assert best["text"] == max(means, key=lambda text: means[text])


SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "dog"]}, "quick": {"type": "boolean"}},
    "required": ["animal", "quick"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_an_answer_fits_its_schema(real_server: ServerProcess, fields: dict[str, object]) -> None:
    choice = chat(real_server, max_tokens=200, seed=1, **fields)["choices"][0]
    content = json.loads(choice["message"]["content"])
    assert content.keys() == {"animal", "quick"}
    assert content["animal"] in ("fox", "dog")
    assert isinstance(content["quick"], bool)
    assert (choice["finish_reason"], choice["eos_reason"]) == ("stop", "end_filter")


@pytest.mark.parametrize(
    "fields",
    [
        {"regex_pattern": "(fox|dog)"},
        {"grammar_string": 'root ::= "fox" | "dog"'},
        {"guided_choice": ["fox", "dog"]},
        {"response_format": {"type": "grammar", "grammar": 'start: "fox" | "dog"'}},
        {"response_format": {"type": "regex", "regex": "[a-z]{3}"}, "guided_choice": ["fox", "Dog", "foxes"]},
    ],
)
def test_other_shapes(real_server: ServerProcess, fields: dict[str, object]) -> None:
    choice = complete(real_server, seed=2, **fields)["choices"][0]
    assert choice["text"] in ("fox", "dog")
    assert choice["finish_reason"] == "stop"


def test_progress_of_a_long_prompt(real_server: ServerProcess) -> None:
    body = {"prompt": "word " * 600, "max_tokens": 1, "stream": True, "return_progress": True}
    with real_server.client() as client:
        events = frames(client.post("/v1/completions", json=body))
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told
    done = [progress["processed"] for progress in told]
    assert done == sorted(done)
    assert all(progress["cache"] <= progress["processed"] <= progress["total"] for progress in told)
