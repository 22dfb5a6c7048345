"""Embeddings and rankings over HTTP, by a real model."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.endpoints.embedding_servers import embedding_server, load
from tests.endpoints.running import API_KEY, RunningServer, eventually
from tests.minilm import MINILM
from tests.serving import served

CAT = "The cat sleeps on the warm windowsill."
# Of that text, from transformers' BertModel: the mean of the last hidden states, divided by its length.
CAT_IDS = [101, 1996, 4937, 25126, 2006, 1996, 4010, 3645, 8591, 1012, 102]
CAT_BEGINS = [0.1074888, -0.0112498, -0.0336635, 0.1452381, -0.0400934, 0.0342653]
DIMENSIONS = 384
TOO_LONG = "word " * 300  # the model reads 256 tokens
DOCUMENTS = [
    "The stock market fell three percent on Monday.",
    "To make bread rise, yeast ferments the sugar in the dough.",
    "The museum opens at nine and closes at five.",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With the model that the package ships; its folder has the name "model"."""
    with embedding_server(tmp_path_factory.mktemp("embeddings"), MINILM.parent) as running:
        load(running, MINILM.name)
        yield running


def embed(server: RunningServer, given: object, **fields: object) -> dict[str, Any]:
    response = server.http.post("/v1/embeddings", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def vector(server: RunningServer, given: object, **fields: object) -> list[float]:
    answer = embed(server, given, **fields)
    found: list[float] = answer["data"][0]["embedding"]
    return found


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def test_a_vector_is_the_one_that_transformers_computes(server: RunningServer) -> None:
    answer = embed(server, CAT)
    found = answer["data"][0]["embedding"]
    assert found[: len(CAT_BEGINS)] == pytest.approx(CAT_BEGINS, abs=1e-5)
    assert len(found) == DIMENSIONS
    assert math.hypot(*found) == pytest.approx(1.0, abs=1e-5)
    assert (answer["object"], answer["model"]) == ("list", "model")
    assert answer["usage"] == {
        "prompt_tokens": len(CAT_IDS), "completion_tokens": 0, "total_tokens": len(CAT_IDS)
    }  # fmt: skip


def test_texts_of_one_meaning_are_near_each_other(server: RunningServer) -> None:
    data = embed(server, [CAT, "A kitten naps in the sun.", "GDP fell."])["data"]
    one, same, other = (each["embedding"] for each in data)
    assert cosine(one, same) > cosine(one, other) + 0.2


def test_token_ids_are_the_text_that_they_stand_for(server: RunningServer) -> None:
    expected = vector(server, CAT)
    assert vector(server, CAT_IDS) == pytest.approx(expected, abs=1e-6)
    several = embed(server, [CAT_IDS, [101, 102], CAT_IDS])
    assert [each["index"] for each in several["data"]] == [0, 1, 2]
    assert several["data"][2]["embedding"] == pytest.approx(expected, abs=1e-5)
    assert several["usage"]["total_tokens"] == 2 * len(CAT_IDS) + 2


def test_a_text_has_the_same_vector_among_others(server: RunningServer) -> None:
    texts = ["x", CAT, "y " * 200, CAT, ""]
    data = embed(server, texts)["data"]
    assert [each["index"] for each in data] == list(range(5))
    for place in (1, 3):
        assert data[place]["embedding"] == pytest.approx(vector(server, CAT), abs=1e-5)


def test_the_official_client_reads_both_encodings(server: RunningServer) -> None:
    with server.openai() as strict:
        floats = strict.embeddings.create(model="model", input=[CAT, "x"], encoding_format="float")
        cut = strict.embeddings.create(model="model", input=CAT_IDS, encoding_format="float", dimensions=8)
        assert len(cut.data[0].embedding) == 8
    # Without being told it asks for base64, which it has for a mistake when it is strict.
    with OpenAI(base_url=f"{server.base_url}/v1", api_key=API_KEY, max_retries=0) as lenient:
        encoded = lenient.embeddings.create(model="model", input=[CAT, "x"])
    for one, other in zip(floats.data, encoded.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert floats.usage == encoded.usage
    raw = embed(server, CAT, encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(raw))) == vector(server, CAT, encoding_format="float")


def test_dimensions_keep_the_beginning_with_length_one(server: RunningServer) -> None:
    whole, cut = vector(server, CAT), vector(server, CAT, dimensions=16)
    length = math.hypot(*whole[:16])
    assert cut == pytest.approx([each / length for each in whole[:16]], abs=1e-6)
    assert vector(server, CAT, dimensions=DIMENSIONS) == whole


def test_what_is_too_long_is_refused_or_cut(server: RunningServer) -> None:
    response = server.http.post("/v1/embeddings", json={"input": [CAT, TOO_LONG]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input.1")
    assert "has 302 tokens, which is too large for model: it reads at most 256" in error["message"]
    assert "detail" not in response.json()
    cut = embed(server, [TOO_LONG, TOO_LONG + "and more of it"], truncate=True)
    assert cut["usage"]["total_tokens"] == 2 * 256
    assert cut["data"][0]["embedding"] == pytest.approx(cut["data"][1]["embedding"], abs=1e-6)
    assert vector(server, TOO_LONG, truncate="END") == pytest.approx(cut["data"][0]["embedding"], abs=1e-5)


def test_documents_are_ranked_by_how_well_they_fit(server: RunningServer) -> None:
    body = {"query": "Why does dough grow in the oven?", "documents": DOCUMENTS}
    answer = server.http.post("/v1/rerank", json=body).json()
    assert answer["results"][0]["index"] == 1
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[1] + 0.2
    assert "document" not in answer["results"][0]
    assert (answer["object"], answer["model"]) == ("list", "model")
    assert answer["usage"]["total_tokens"] > 30

    objects = {**body, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 1, "return_documents": True}
    best = server.http.post("/rerank", json=objects).json()["results"]
    assert best == [{"index": 1, "relevance_score": scores[0], "document": {"text": DOCUMENTS[1]}}]

    texts = {"query": body["query"], "texts": DOCUMENTS, "top_n": 2}
    plain = server.http.post("/rerank", json=texts).json()
    assert plain == [{"index": each["index"], "score": each["relevance_score"]} for each in answer["results"][:2]]
    with_text = server.http.post("/rerank", json={**texts, "return_text": True}).json()
    assert with_text[0]["text"] == DOCUMENTS[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input.0"),
        ({"input": 5}, "input"),
        ({"input": {"text": CAT}}, "input"),
        ({"input": [1, "a"]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [True]}, "input.0"),
        ({"input": [1.5]}, "input.0"),
        ({"input": [-1]}, "input.0"),
        ({"input": [30522]}, "input"),
        ({"input": [10**40]}, "input.0"),
        ({"input": [[101], [30522]]}, "input.1"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1] * 257}, "input"),
        ({"input": CAT, "encoding_format": "hex"}, "encoding_format"),
        ({"input": CAT, "dimensions": 0}, "dimensions"),
        ({"input": CAT, "dimensions": 385}, "dimensions"),
        ({"input": CAT, "dimensions": 10**40}, "dimensions"),
        ({"input": CAT, "dimensions": "8"}, "dimensions"),
        ({"input": CAT, "truncate": "START"}, "truncate"),
        ({"input": CAT, "input_type": "image"}, "input_type"),
        ({"input": CAT, "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_a_request_that_cannot_be_served_says_where(server: RunningServer, body: dict[str, object], param: str) -> None:
    response = server.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": TOO_LONG}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": [5]}, "documents.0"),
        ({"documents": [{"text": 5}]}, "documents.0"),
        ({"documents": ["a", TOO_LONG]}, "documents.1"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": 0}, "top_n"),
    ],
)
def test_a_ranking_that_cannot_be_done_says_where(server: RunningServer, fields: dict[str, object], param: str) -> None:
    response = server.http.post("/v1/rerank", json={"query": "a", "documents": ["a", "b"], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_null_is_the_same_as_leaving_a_field_out(server: RunningServer) -> None:
    fields = ("model", "encoding_format", "dimensions", "normalize", "truncate", "input_type", "prompt_name", "user")
    assert vector(server, CAT, **dict.fromkeys(fields)) == vector(server, CAT)
    nulls = dict.fromkeys(("model", "top_n", "return_documents", "truncate", "raw_scores"))
    response = server.http.post("/v1/rerank", json={"query": "a", "documents": ["a"], **nulls})
    assert response.status_code == 200, response.text


@pytest.mark.slow
def test_the_model_that_the_settings_name_is_loaded_at_start(tmp_path: Path) -> None:
    options = ("--embedding-model-dir", str(MINILM.parent), "--embedding-model-name", MINILM.name)
    with served(tmp_path, *options) as process, process.client() as client:
        eventually(lambda: client.get("/v1/model/embedding").status_code == 200)
        answer = client.post("/v1/embeddings", json={"input": CAT}).json()
    assert answer["data"][0]["embedding"][: len(CAT_BEGINS)] == pytest.approx(CAT_BEGINS, abs=1e-5)


def test_queries_and_documents_are_alike_to_a_model_without_prompts(server: RunningServer) -> None:
    assert vector(server, CAT, input_type="search_query") == vector(server, CAT, input_type="passage")
