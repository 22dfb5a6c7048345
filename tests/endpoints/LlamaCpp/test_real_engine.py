"""`/completion` on the real engine."""

from __future__ import annotations

import json
from typing import Any

from tests.serving import ServerProcess

PROMPT = "The quick brown fox"


def post(server: ServerProcess, path: str, **body: object) -> Any:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


def test_a_prompt_that_was_only_processed_is_cached(real_server: ServerProcess) -> None:
    prompt = "warm " * 300
    first = post(real_server, "/completion", prompt=prompt, n_predict=0)
    assert (first["content"], first["tokens_predicted"], first["tokens_cached"]) == ("", 0, 0)
    again = post(real_server, "/completion", prompt=prompt + "up", n_predict=1)
    assert again["tokens_cached"] >= 256
    timings = again["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == again["tokens_evaluated"]


def test_a_stream_is_the_whole_answer_in_pieces(real_server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "n_predict": 12, "seed": 3, "temperature": 1.5, "n_probs": 2, "return_tokens": True}
    whole = post(real_server, "/completion", **body)
    *pieces, last = post(real_server, "/completion", **body, stream=True)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert all(len(piece["tokens"]) == len(piece["completion_probabilities"]) == 1 for piece in pieces)
    assert [entry["id"] for entry in whole["completion_probabilities"]] == whole["tokens"]
    assert {len(entry["top_logprobs"]) for entry in whole["completion_probabilities"]} == {2}
    assert last["tokens_predicted"] == whole["tokens_predicted"] == len(whole["tokens"]) == 12
    assert (last["stop_type"], last["truncated"]) == ("limit", False)


def test_tokens_and_text_make_the_same_prompt(real_server: ServerProcess) -> None:
    tokens = post(real_server, "/tokenize", content=PROMPT, add_special=True)["tokens"]
    half = post(real_server, "/tokenize", content="The quick", add_special=True)["tokens"]
    prompts = [PROMPT, tokens, [*half, " brown fox"]]
    answers = post(real_server, "/completion", prompt=prompts, n_predict=6, temperature=0)
    assert {answer["content"] for answer in answers} == {answers[0]["content"]}
    assert {answer["prompt"] for answer in answers} == {PROMPT}


def test_biases_of_tokens_and_texts(real_server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "return_tokens": True}
    [token] = post(real_server, "/completion", **body)["tokens"]
    [other] = post(real_server, "/completion", **body, logit_bias=[[token, False]])["tokens"]
    assert other != token
    assert post(real_server, "/completion", **body, logit_bias=[["z", 1000]])["content"] == "z"


def test_a_grammar(real_server: ServerProcess) -> None:
    answer = post(real_server, "/completion", prompt=PROMPT, n_predict=9, grammar='root ::= "fox" | "dog"', seed=1)
    assert (answer["content"] in ("fox", "dog"), answer["stop_type"]) == (True, "eos")
