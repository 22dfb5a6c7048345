from __future__ import annotations

from typing import Any

import pytest

from tests.endpoints.OAI.test_chat import frames
from tests.endpoints.running import RunningServer


def complete(server: RunningServer, **body: object) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_openai_client_gets_a_whole_answer(server: RunningServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="gpt-4o", prompt="COUNT")
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "alpha"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("COUNT")


def test_frames_of_a_stream(server: RunningServer) -> None:
    body = {"prompt": "COUNT", "stream": True, "stream_options": {"include_usage": True}}
    *events, last = frames(server.http.post("/v1/completions", json=body))
    assert [event["choices"][0]["text"] for event in events] == ["one ", "two ", "three", ""]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == len("COUNT") + len("one two three")


def test_prompts_in_every_form(server: RunningServer) -> None:
    forms: list[tuple[object, list[object]]] = [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ]
    for given, prompts in forms:
        complete(server, prompt=given)
        assert [request.prompt for request in server.engine.history()[-len(prompts) :]] == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[]], [-1], [[1], [True]], {"a": 1}, 5, [""] * 129])
def test_prompts_that_are_none(server: RunningServer, prompt: object) -> None:
    response = server.http.post("/v1/completions", json={"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_indices_and_usage_of_several_prompts(server: RunningServer) -> None:
    answer = complete(server, prompt=["COUNT", "other"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    counted, other = "one two three", "Hello world"
    assert [choice["text"] for choice in answer["choices"]] == [counted, counted, other, other]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len("COUNT") + len("other")
    assert usage["completion_tokens"] == 2 * (len(counted) + len(other))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"best_of": 1, "n": 2}])
def test_what_is_not_there_is_refused(server: RunningServer, fields: dict[str, object]) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")


def test_neutral_values_of_what_is_not_there(server: RunningServer) -> None:
    complete(server, prompt="x", echo=False, suffix="", best_of=1, json_schema={}, grammar_string="", regex_pattern="")


def test_bos_as_the_request_says(server: RunningServer) -> None:
    for add_bos in (True, False, None):
        complete(server, prompt="x", add_bos_token=add_bos)
        assert server.engine.history()[-1].add_bos is add_bos
