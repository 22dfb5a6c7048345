"""`/completion` on the scripted engine, where a token is a character and its id the code point."""

from __future__ import annotations

import json
from typing import Any

import pytest

from endpoints.answering import IGNORED_HEADER
from tests.endpoints.front_ends import SILLYTAVERN_NEUTRAL
from tests.endpoints.running import RunningServer

COUNTED = "one two three"
PROGRESS = "PROGRESS".ljust(600, ".")


def complete(server: RunningServer, **body: object) -> dict[str, Any]:
    response = server.http.post("/completion", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(server: RunningServer, **body: object) -> list[dict[str, Any]]:
    response = server.http.post("/completion", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_whole_answer(server: RunningServer) -> None:
    answer = complete(server, prompt="COUNT", n_predict=40, return_tokens=True)
    assert list(answer) == [
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
        "timings",
    ]  # fmt: skip
    timings, settings = answer.pop("timings"), answer.pop("generation_settings")
    assert answer == {
        "index": 0,
        "content": COUNTED,
        "tokens": [ord(character) for character in COUNTED],
        "id_slot": -1,
        "stop": True,
        "model": "alpha",
        "tokens_predicted": 13,
        "tokens_evaluated": 5,
        "prompt": "COUNT",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 4,
    }
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (4, 1, 13)
    assert list(timings) == [
        "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
        "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
    ]  # fmt: skip
    assert settings["n_predict"] == settings["max_tokens"] == 40
    assert settings["n_ctx"] == 4096


def test_a_stream(server: RunningServer) -> None:
    *pieces, last = streamed(server, prompt="COUNT")
    assert pieces == [
        {"index": 0, "content": text, "tokens": [ord(character) for character in text], "stop": False, "id_slot": -1,
         "tokens_predicted": predicted, "tokens_evaluated": 5}
        for text, predicted in [("one ", 4), ("two ", 8), ("three", 13)]
    ]  # fmt: skip
    whole = complete(server, prompt="COUNT")
    assert whole["generation_settings"].pop("stream") is False
    assert last["generation_settings"].pop("stream") is True
    assert last == {**whole, "content": "", "tokens": []}


def test_tokens_on_request_only(server: RunningServer) -> None:
    assert complete(server, prompt="COUNT")["tokens"] == []


def test_a_stream_that_fails_says_so(server: RunningServer) -> None:
    *_, last = streamed(server, prompt="FAIL")
    assert last["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("body", "stop_type", "word", "truncated"),
    [
        ({"prompt": "COUNT"}, "eos", "", False),
        ({"prompt": "COUNT", "n_predict": 3}, "limit", "", False),
        ({"prompt": "STOP", "stop": ["###"]}, "word", "###", False),
        ({"prompt": "COUNT" + "x" * 4086, "n_predict": 200}, "limit", "", True),
        ({"prompt": "COUNT" + "x" * 4086}, "limit", "", True),
    ],
)
def test_how_an_answer_ends(
    server: RunningServer, body: dict[str, Any], stop_type: str, word: str, truncated: bool
) -> None:
    answer = complete(server, **body)
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == (stop_type, word, truncated)


def test_a_new_line_is_noticed(server: RunningServer) -> None:
    assert complete(server, prompt="TAG IT")["has_new_line"] is True
    assert streamed(server, prompt="TAG IT")[-1]["has_new_line"] is True


def test_chosen_fields(server: RunningServer) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/cache_n", "no/such", "prompt/x"]
    chosen = {"content": COUNTED, "generation_settings/n_predict": 40, "timings/cache_n": 4}
    assert complete(server, prompt="COUNT", n_predict=40, response_fields=fields) == chosen
    first, *_, last = streamed(server, prompt="COUNT", n_predict=40, response_fields=fields)
    assert first["stop"] is False
    assert last == {**chosen, "content": ""}


def test_timings_in_every_event(server: RunningServer) -> None:
    assert all("timings" not in event for event in streamed(server, prompt="COUNT")[:-1])
    events = streamed(server, prompt=PROGRESS, timings_per_token=True)
    assert [event["timings"]["predicted_n"] for event in events] == [5, 11, 11]
    assert {event["timings"]["cache_n"] for event in events} == {128}
    assert (events[-1]["timings"]["draft_n"], events[-1]["timings"]["draft_n_accepted"]) == (9, 7)


def test_progress(server: RunningServer) -> None:
    events = streamed(server, prompt=PROGRESS, return_progress=True)
    told = [(event["content"], event["prompt_progress"]) for event in events if "prompt_progress" in event]
    assert [(text, progress["processed"]) for text, progress in told] == [("", 256), ("", 600)]
    assert {(progress["cache"], progress["total"]) for _, progress in told} == {(128, 600)}
    assert not any("prompt_progress" in event for event in streamed(server, prompt=PROGRESS))
    assert complete(server, prompt=PROGRESS, return_progress=True)["content"] == "Hello world"


# --- probabilities ------------------------------------------------------------------------------------------------


def test_probabilities(server: RunningServer) -> None:
    answer = complete(server, prompt="COUNT", n_predict=2, n_probs=2)
    alternatives = [
        {"id": 111, "token": "o", "bytes": [111], "logprob": -0.5},
        {"id": 112, "token": "p", "bytes": [112], "logprob": -1.5},
    ]
    first, second = answer["completion_probabilities"]
    assert first == {**alternatives[0], "top_logprobs": alternatives}
    assert second["token"] == "n"


def test_an_event_has_the_probabilities_of_one_token(server: RunningServer) -> None:
    *pieces, last = streamed(server, prompt="HELD", n_probs=1)
    seen = [(piece["content"], piece["tokens"], len(piece["completion_probabilities"])) for piece in pieces]
    assert seen == [("a", [1], 1), ("", [2], 1), ("é", [3], 1), ("!", [4], 1)]
    assert "completion_probabilities" not in last


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "asked", "text"),
    [
        ("ab", "ab", "ab"),
        ({"prompt_string": "ab"}, "ab", "ab"),
        ({"prompt_string": "ab", "multimodal_data": []}, "ab", "ab"),
        (["ab"], "ab", "ab"),
        ([97, 98], [97, 98], "ab"),
        ([[97, 98]], [97, 98], "ab"),
        ([97, "bc", 100, ""], [97, 98, 99, 100], "abcd"),
        (["ab", 99], [97, 98, 99], "abc"),
    ],
)
def test_one_prompt(server: RunningServer, prompt: object, asked: object, text: str) -> None:
    assert complete(server, prompt=prompt)["prompt"] == text
    assert server.engine.history()[-1].prompt == asked


def test_several_prompts(server: RunningServer) -> None:
    body = {"prompt": ["COUNT", [97, "b"], {"prompt_string": "x"}], "n_cmpl": 2, "seed": 5}
    answers = server.http.post("/completion", json=body).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3, 4, 5]
    assert [answer["prompt"] for answer in answers] == ["COUNT", "COUNT", "ab", "ab", "x", "x"]
    assert [answer["content"] for answer in answers] == [COUNTED] * 2 + ["Hello world"] * 4
    assert [answer["generation_settings"]["seed"] for answer in answers] == [5, 6] * 3
    events = streamed(server, **body)
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, [[]], [True], [-1], [0x110000], [[97, "b", {"prompt_string": "c"}]], ["x"] * 129,
     {"prompt_string": 5}, {"prompt_string": "x", "multimodal_data": ["aGk="]}],
)  # fmt: skip
def test_prompts_that_are_none(server: RunningServer, prompt: object) -> None:
    response = server.http.post("/completion", json={"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_a_prompt_is_processed_without_an_answer(server: RunningServer) -> None:
    answer = complete(server, prompt="COUNT", n_predict=0, min_tokens=3, return_tokens=True, n_probs=1)
    # Else the engine would not keep the prompt.
    assert (server.engine.history()[-1].max_tokens, server.engine.history()[-1].prompt_only) == (1, False)
    assert (answer["content"], answer["tokens"], answer["stop_type"], answer["truncated"]) == ("", [], "limit", False)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["timings"]["predicted_n"]) == (5, 0, 0)
    assert answer["generation_settings"]["n_predict"] == 0
    assert "completion_probabilities" not in answer
    assert [event["stop"] for event in streamed(server, prompt="COUNT", n_predict=0)] == [True]


def test_no_limit(server: RunningServer) -> None:
    for body in ({}, {"n_predict": -1}, {"n_predict": None}):
        assert complete(server, prompt="COUNT", **body)["generation_settings"]["n_predict"] == -1
        assert server.engine.history()[-1].max_tokens == 0


def test_a_presets_zero_is_no_limit(server: RunningServer) -> None:
    overrides = {"max_tokens": {"override": 0}}
    try:
        server.admin.post("/v1/sampling/override/switch", json={"overrides": overrides}).raise_for_status()
        assert complete(server, prompt="COUNT")["content"] == COUNTED
    finally:
        server.admin.post("/v1/sampling/override/unload").raise_for_status()


# --- sampling -----------------------------------------------------------------------------------------------------


def test_sampling_under_llama_cpps_names(server: RunningServer) -> None:
    given = {
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1, "repeat_last_n": 64,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "dry_multiplier": 0.8, "dry_base": 2.0,
        "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5,
        "xtc_threshold": 0.2, "adaptive_target": 0.5, "adaptive_decay": 0.8, "ignore_eos": True, "seed": 3,
        "stop": ["x"],
    }  # fmt: skip
    settings = complete(server, prompt="x", **given)["generation_settings"]
    assert {name: settings[name] for name in given} == given
    sampling = server.engine.history()[-1].sampling
    assert (sampling.repetition_penalty, sampling.penalty_range, sampling.ban_eos_token) == (1.1, 64, True)


@pytest.mark.parametrize(
    ("samplers", "last", "in_force"),
    [
        (None, True, ["penalties", "dry", "top_k", "top_p", "min_p", "temperature", "xtc", "adaptive_p"]),
        (["top_k", "temperature"], True, ["top_k", "temperature"]),
        (["temperature", "typ_p", "top_k"], False, ["temperature", "top_k"]),
        (["temperature", "dry"], True, ["dry", "temperature"]),
        ([], True, []),
    ],
)
def test_samplers_that_are_named(
    server: RunningServer, samplers: list[str] | None, last: bool, in_force: list[str]
) -> None:
    body = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "repeat_penalty": 1.5, "samplers": samplers}
    answer = complete(server, prompt="x", **body)
    assert answer["generation_settings"]["samplers"] == in_force
    sampling = server.engine.history()[-1].sampling
    assert sampling.temperature_last is last
    assert sampling.temperature == (0.5 if "temperature" in in_force else 1.0)
    assert sampling.top_k == (5 if "top_k" in in_force else 0)
    assert sampling.top_p == (0.5 if "top_p" in in_force else 1.0)
    assert sampling.repetition_penalty == (1.5 if "penalties" in in_force else 1.0)


@pytest.mark.parametrize(
    ("given", "biases"),
    [
        ([[5, 1.5], [6, False], [7, None]], {5: 1.5, 6: -1000.0}),
        ([["ab", -2], [97, 3]], {97: 3.0, 98: -2.0}),
        ([["5", 1]], {ord("5"): 1.0}),
        ({"5": 1, "ab": -1, "x": None}, {5: 1.0, 97: -1.0, 98: -1.0}),
        ([], {}),
    ],
)
def test_biases(server: RunningServer, given: object, biases: dict[int, float]) -> None:
    answer = complete(server, prompt="x", logit_bias=given)
    assert server.engine.history()[-1].sampling.logit_bias == biases
    told = {entry["token"]: entry["bias"] for entry in answer["generation_settings"]["logit_bias"]}
    assert told == {token: None if bias == -1000 else bias for token, bias in biases.items()}


@pytest.mark.parametrize(
    "given", [5, ["a"], [[1]], [[1, 2, 3]], [[True, 1]], [[[5], 1]], [[5.5, 1]], [["a", "b"]], [[-1, 1]], {"a": 1001}]
)
def test_biases_that_are_none(server: RunningServer, given: object) -> None:
    response = server.http.post("/completion", json={"prompt": "x", "logit_bias": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("logit_bias")


def test_a_negative_temperature_is_greedy(server: RunningServer) -> None:
    complete(server, prompt="x", temperature=-1)
    assert server.engine.history()[-1].sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"json_schema": {"type": "string"}}, "json_schema", '{"type": "string"}'),
        ({"json_schema": {}}, "json_schema", "true"),
    ],
)
def test_constraints(server: RunningServer, fields: dict[str, object], kind: str, text: str) -> None:
    complete(server, prompt="x", **fields)
    [constraint] = server.engine.history()[-1].constraints
    assert (constraint.kind, constraint.text) == (kind, text)


def test_what_asks_for_nothing(server: RunningServer) -> None:
    complete(server, prompt="x")
    neutral = server.engine.history()[-1]
    complete(
        server, prompt="x", n_predict=-1, grammar="", seed=-1, n_probs=0, cache_prompt=False, id_slot=-1, n_keep=-1,
        n_discard=0, n_indent=0, min_keep=0, t_max_predict_ms=0, lora=[{"id": 0, "scale": 0}], logit_bias=[],
        post_sampling_probs=True, response_fields=[], stop=[], mirostat=0, typical_p=1, n_cmpl=1, json_schema=None,
    )  # fmt: skip
    assert server.engine.history()[-1] == neutral


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"post_sampling_probs": True, "n_probs": 2}, "post_sampling_probs"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_indent": 2}, "n_indent"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"grammar": "root ::= ("}, "grammar_string"),
        ({"n_predict": -2}, "n_predict"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, object], param: str) -> None:
    response = server.http.post("/completion", json={"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_no_effect_is_named(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "x", "mirostat": 2, "t_max_predict_ms": 100, "min_keep": 1, "stream": stream}
    response = server.http.post("/completion", json=body)
    assert set(response.headers[IGNORED_HEADER].split(", ")) == {"mirostat_mode", "t_max_predict_ms", "min_keep"}
    assert IGNORED_HEADER not in server.http.post("/completion", json={"prompt": "x"}).headers


def test_pings_as_the_request_says(server: RunningServer) -> None:
    body = {"prompt": "BUSY", "stream": True}
    assert ": ping" in server.http.post("/completion", json=body).text
    assert ": ping" not in server.http.post("/completion", json={**body, "sse_ping_interval": -1}).text


# --- a front end --------------------------------------------------------------------------------------------------

# What SillyTavern adds to its text completion where the server is llama.cpp's, all samplers off.
SILLYTAVERN: dict[str, Any] = {
    **SILLYTAVERN_NEUTRAL,
    "n_predict": 250,
    "n_probs": 0,
    "ignore_eos": False,
    "mirostat": 0,
    "repeat_penalty": 1,
    "repeat_last_n": 0,
    "tfs_z": 1,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "logit_bias": [],
    "json_schema": None,
    "grammar": "",
    "cache_prompt": True,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "api_type": "llamacpp",
}


def test_sillytavern(server: RunningServer) -> None:
    response = server.http.post("/completion", json=SILLYTAVERN)
    assert response.json()["content"] == COUNTED
    assert IGNORED_HEADER not in response.headers
    sampling = server.engine.history()[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (1.0, 0, 1.0, 1.0)
    events = streamed(server, **{**SILLYTAVERN, "n_probs": 10, "logit_bias": [[111, -50]]})
    assert "".join(event["content"] for event in events) == COUNTED
    # It looks at the first entry of an event.
    assert [event["completion_probabilities"][0]["token"] for event in events[:-1]] == list(COUNTED)
