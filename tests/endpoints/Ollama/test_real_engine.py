"""Ollama's routes on the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import ollama
import pytest

from tests.endpoints.Ollama.clients import ollama_client
from tests.serving import ServerProcess

MESSAGES = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def client(real_server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama_client(real_server.base_url, real_server.api_key) as client:
        yield client


def test_a_stream_is_the_whole_answer_in_pieces(client: ollama.Client, real_server: ServerProcess) -> None:
    options = {"num_predict": 12, "seed": 3, "temperature": 1.5}
    name = real_server.model or ""
    whole = client.chat(name, MESSAGES, options=options)
    *pieces, last = client.chat(name, MESSAGES, options=options, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert (whole.eval_count, whole.done_reason) == (12, "length")
    assert 0 < (whole.eval_duration or 0) < (whole.total_duration or 0)


def test_a_schema_is_enforced(client: ollama.Client, real_server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    answer = client.generate(real_server.model or "", "Sure?", format=schema, options={"num_predict": 60})
    assert json.loads(answer.response or "")["sure"] in (True, False)


def test_what_is_said_of_the_model(client: ollama.Client, real_server: ServerProcess) -> None:
    name = f"{real_server.model}:latest"
    shown = client.show(name)
    [running] = client.ps().models
    info = shown.modelinfo or {}
    assert running.model == name
    assert info[f"{info['general.architecture']}.context_length"] == running.context_length
    assert "completion" in (shown.capabilities or ())
