from __future__ import annotations

from typing import Any

import pytest

from backends.messages import ControlToken
from tests.endpoints.OAI.test_chat import frames
from tests.endpoints.running import RunningServer
from tests.scripted_worker import ModelScript, Script


def complete(server: RunningServer, **body: object) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed_completion(server: RunningServer, **body: object) -> list[dict[str, Any]]:
    return frames(server.http.post("/v1/completions", json={**body, "stream": True}))


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


def test_neutral_values(server: RunningServer) -> None:
    complete(server, prompt="x")
    neutral = server.engine.history()[-1]
    complete(
        server, prompt="x", echo=False, suffix="", best_of=1, json_schema={}, grammar_string="", regex_pattern="",
        stop="", seed=-1, max_tokens=-1, n_probs=0, custom_token_bans="", modalities=["text"],
    )  # fmt: skip
    assert server.engine.history()[-1] == neutral


def test_the_most_likely_of_several_answers(server: RunningServer) -> None:
    answer = complete(server, prompt="RANK", best_of=4, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "best"), (1, "good")]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 4 * len("best")
    answer = complete(server, prompt=["RANK", "COUNT"], best_of=4, logprobs=0)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "best"), (1, "one two three")]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"n": 129}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, object], param: str) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)


def test_as_many_answers_as_are_returned_may_be_streamed(server: RunningServer) -> None:
    events = streamed_completion(server, prompt="COUNT", best_of=2, n=2)
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}


def test_the_middle_is_filled_in(empty_server: RunningServer) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    control_tokens = [ControlToken(name, index, special=True) for index, name in enumerate(names)]
    empty_server.engine.write(Script(models={"beta": ModelScript(control_tokens=control_tokens)}))
    empty_server.load("beta")
    answer = complete(empty_server, prompt=["def f(", "a ="], suffix="return x")
    assert [choice["text"] for choice in answer["choices"]] == ["Hello world"] * 2
    assert [request.prompt for request in empty_server.engine.history()] == [
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>",
        "<|fim_prefix|>a =<|fim_suffix|>return x<|fim_middle|>",
    ]


def test_every_answer_has_a_seed_of_its_own(server: RunningServer) -> None:
    complete(server, prompt=["a", "b"], n=2, seed=7)
    asked = server.engine.history()[-4:]
    assert [(request.prompt, request.seed) for request in asked] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


@pytest.mark.parametrize("keep", [True, False])
def test_the_stop_string_is_kept_on_request(server: RunningServer, keep: bool) -> None:
    text = "one two###" if keep else "one two"
    choice = complete(server, prompt="STOP", include_stop_str_in_output=keep)["choices"][0]
    assert (choice["text"], choice["stop_str"], choice["eos_reason"]) == (text, "###", "stop_string")
    events = streamed_completion(server, prompt="STOP", include_stop_str_in_output=keep)
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == text


def test_stop_tokens_under_either_name(server: RunningServer) -> None:
    complete(server, prompt="x", stop=["a", 5], stop_token_ids=[6])
    assert server.engine.history()[-1].stop_tokens == [5, 6]


def test_bos_as_the_request_says(server: RunningServer) -> None:
    for add_bos in (True, False, None):
        complete(server, prompt="x", add_bos_token=add_bos)
        assert server.engine.history()[-1].add_bos is add_bos
