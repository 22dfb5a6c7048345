"""What SillyTavern and Open WebUI send, and what they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.sampling import SamplingParameters
from endpoints.answering import IGNORED_HEADER
from tests.endpoints.front_ends import (
    OPEN_WEBUI_CHAT,
    OPEN_WEBUI_TASKS,
    SILLYTAVERN_LACKING,
    SILLYTAVERN_NEUTRAL,
    SILLYTAVERN_TUNED,
)
from tests.endpoints.OAI.test_chat import frames
from tests.endpoints.OAI.test_completion import complete
from tests.endpoints.running import ADMIN_KEY, RunningServer

BREAKERS = ["\n", ":", '"', "*"]


def sillytavern(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The pieces of text that SillyTavern shows, streamed or not."""
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    lacking = response.headers.get(IGNORED_HEADER, "")
    assert set(filter(None, lacking.split(", "))) == (SILLYTAVERN_LACKING if "seed" in body else set())
    events = frames(response) if body["stream"] else [response.json()]
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_sillytavern_with_samplers_off(server: RunningServer, stream: bool) -> None:
    choices = sillytavern(server, SILLYTAVERN_NEUTRAL | {"stream": stream})
    assert "".join(choice["text"] for choice in choices) == "one two three"
    asked = server.engine.history()[-1]
    assert asked.prompt == "Narrator: COUNT\nMira:"
    assert asked.sampling == SamplingParameters(temperature_last=True, penalty_range=0, dry_sequence_breakers=BREAKERS)
    assert (asked.max_tokens, asked.min_tokens, asked.seed, asked.logprobs) == (250, 0, None, None)
    assert (asked.stop_strings, asked.stop_tokens, asked.banned_strings) == (["\nNarrator:"], [], [])
    assert (asked.add_bos, asked.token_healing, asked.constraints) == (True, False, [])


@pytest.mark.parametrize("stream", [False, True])
def test_sillytavern_with_samplers_on(server: RunningServer, stream: bool) -> None:
    choices = sillytavern(server, SILLYTAVERN_TUNED | {"stream": stream})
    assert "".join(choice["text"] for choice in choices) == "one two three"
    asked = server.engine.history()[-1]
    assert asked.sampling == SamplingParameters(
        temperature=0.85,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        xtc_probability=0.5,
        repetition_penalty=1.1,
        frequency_penalty=-0.2,
        presence_penalty=0.3,
        penalty_range=1024,
        dry_multiplier=0.8,
        dry_range=512,
        dry_sequence_breakers=BREAKERS,
        adaptive_target=0.6,
        logit_bias={9: -50.0},
        banned_tokens=[5, 7],
        ban_eos_token=True,
    )
    assert (asked.max_tokens, asked.min_tokens, asked.seed, asked.logprobs) == (40, 10, 42, 10)
    assert (asked.banned_strings, asked.token_healing) == ([" shivers down", "testament to"], True)
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for part in logprobs for token in part["tokens"]] == list("one two three")
    assert len(logprobs[0]["top_logprobs"][0]) == 10


def test_sillytaverns_token_counter(server: RunningServer) -> None:
    answer = server.http.post("/v1/token/encode", json={"text": "count me"}).json()
    assert (answer["length"], len(answer["tokens"])) == (8, 8)


def test_sillytaverns_connection_check(server: RunningServer) -> None:
    headers = {"x-api-key": ADMIN_KEY, "Authorization": f"Bearer {ADMIN_KEY}"}
    models = server.anonymous.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == ["alpha", "beta"]
    assert server.anonymous.get("/v1/model", headers=headers).json()["id"] == "alpha"
    assert server.anonymous.get("/props", headers=headers).json()["chat_template"]


def test_sillytaverns_model_loader(empty_server: RunningServer) -> None:
    headers = {"x-admin-key": ADMIN_KEY, "Authorization": f"Bearer {ADMIN_KEY}"}
    client = empty_server.anonymous
    assert [model["id"] for model in client.get("/v1/model/list", headers=headers).json()["data"]] == ["alpha", "beta"]
    # What its dialogue leaves open is null, or what TabbyAPI once knew.
    settings: dict[str, object] = {
        "max_seq_len": 2048, "cache_size": None, "cache_mode": "FP16", "gpu_split_auto": True, "gpu_split": [],
        "rope_scale": None, "rope_alpha": "auto", "tensor_parallel": None, "draft": None,
    }  # fmt: skip
    response = client.post("/v1/model/load", headers=headers, json={"model_name": "beta", **settings})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [event["status"] for event in events] == ["processing"] * 3 + ["finished"]
    assert {event["modules"] for event in events} == {3}
    assert complete(empty_server, prompt="x")["model"] == "beta"
    assert client.get("/v1/model/unload", headers=headers).status_code == 200
    assert client.get("/v1/model", headers=headers).status_code == 503


def test_open_webuis_chat(server: RunningServer) -> None:
    *events, usage = frames(server.http.post("/v1/chat/completions", json=OPEN_WEBUI_CHAT))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "one two three"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len("one two three")
    asked = server.engine.history()[-1]
    assert asked.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCOUNT<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.sampling == SamplingParameters()


@pytest.mark.parametrize("task", OPEN_WEBUI_TASKS)
def test_open_webuis_tasks_get_json(server: RunningServer, task: str) -> None:
    response = server.http.post("/v1/chat/completions", json=OPEN_WEBUI_TASKS[task])
    assert response.status_code == 200
    content = response.json()["choices"][0]["message"]["content"]
    assert list(json.loads(content[content.index("{") : content.rindex("}") + 1])) == [task]
    assert server.engine.history()[-1].max_tokens == 1000


def test_open_webuis_list_of_models(server: RunningServer) -> None:
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["alpha"]
