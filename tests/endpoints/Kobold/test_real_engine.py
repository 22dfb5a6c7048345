"""Kobold's routes on the real engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.endpoints.running import eventually
from tests.serving import ServerProcess

PROMPT = "The quick brown fox"


def post(server: ServerProcess, path: str, **body: object) -> Any:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(server: ServerProcess, **body: object) -> dict[str, Any]:
    result: dict[str, Any] = post(server, "/api/v1/generate", **body)["results"][0]
    return result


def test_a_stream_is_the_whole_answer_in_pieces(real_server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_length": 12, "sampler_seed": 3, "temperature": 1.5}
    whole = generate(real_server, **body)
    with real_server.client() as client:
        text = client.post("/api/extra/generate/stream", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["token"] for event in events) == whole["text"]
    assert (whole["completion_tokens"], whole["finish_reason"]) == (12, "length")


def test_a_long_prompt_loses_its_beginning(real_server: ServerProcess) -> None:
    tokens = post(real_server, "/api/extra/tokencount", prompt=f"{PROMPT} " * 60)
    assert tokens["value"] == len(tokens["ids"]) > 200
    body = {"max_context_length": 100, "max_length": 20, "top_k": 1}
    result = generate(real_server, prompt=f"{PROMPT} " * 60, **body)
    assert (result["prompt_tokens"], result["completion_tokens"]) == (80, 20)


def test_an_abort_ends_the_job(real_server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_length": 4000, "use_default_badwordsids": True, "genkey": "long"}
    with ThreadPoolExecutor(1) as background:
        answer = background.submit(generate, real_server, **body)
        eventually(lambda: bool(post(real_server, "/api/extra/generate/check", genkey="long")["results"]))
        eventually(lambda: bool(post(real_server, "/api/extra/generate/check", genkey="long")["results"][0]["text"]))
        post(real_server, "/api/extra/abort", genkey="long")
        result = answer.result(60)
    assert result["finish_reason"] == "abort"
    assert 0 < result["completion_tokens"] < 4000
    with real_server.client() as client:
        eventually(lambda: client.get("/api/extra/perf").json()["idle"] == 1)
