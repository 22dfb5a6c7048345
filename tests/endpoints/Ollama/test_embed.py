"""Ollama's routes that embed, over a scripted embedding model, whose vectors count the letters a to h."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from tests.endpoints.embedding_servers import SCRIPTED, add_models, embedding_server, load
from tests.endpoints.Ollama.clients import ollama_client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    root = tmp_path_factory.mktemp("ollama")
    models = add_models(root / "embedders", "letters")
    with (
        embedding_server(root, models, command=SCRIPTED) as server,
        ollama_client(server.base_url) as client,
    ):
        load(server, "letters")
        yield client


def test_vectors_have_length_one(client: ollama.Client) -> None:
    one = client.embed("letters", "aaaabbb")
    assert (one.model, one.prompt_eval_count) == ("letters", 1)
    assert [list(vector) for vector in one.embeddings] == [pytest.approx([0.8, 0.6, 0, 0, 0, 0, 0, 0])]
    several = client.embed("letters:latest", ["a", "b b"])
    assert [list(vector).index(1.0) for vector in several.embeddings] == [0, 1]
    assert several.prompt_eval_count == 3
    assert (several.total_duration or 0) > 0
    assert len(client.embed("letters", "aaaabbb", dimensions=2).embeddings[0]) == 2
    assert client.embed("letters", []).embeddings == []


def test_the_older_route(client: ollama.Client) -> None:
    assert list(client.embeddings("letters", "aab").embedding) == [2, 1, 0, 0, 0, 0, 0, 0]


def test_a_text_that_is_too_long(client: ollama.Client) -> None:
    text = "a " * 30
    assert client.embed("letters", text).prompt_eval_count == 20
    with pytest.raises(ollama.ResponseError, match="input") as error:
        client.embed("letters", text, truncate=False)
    assert error.value.status_code == 400


def test_embedding_models_are_listed(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["letters:latest"]
    [running] = client.ps().models
    assert (running.name, running.context_length, running.size_vram) == ("letters:latest", 20, 0)
    shown = client.show("letters")
    assert shown.capabilities == ["embedding"]
    assert (shown.modelinfo or {})[".context_length"] == 20


def test_a_model_that_does_not_embed(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'alpha' not found") as error:
        client.embed("alpha", "a")
    assert error.value.status_code == 404
