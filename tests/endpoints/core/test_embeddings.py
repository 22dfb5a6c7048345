"""Loading and using embedding models over HTTP, by scripted processes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.endpoints.embedding_servers import SCRIPTED, add_models, embedding_server, load
from tests.endpoints.running import API_KEY, RunningServer, eventually
from tests.serving import TRUSTED

LOAD, UNLOAD = "/v1/model/embedding/load", "/v1/model/embedding/unload"
FINISHED = {"model_type": "embedding_model", "module": 1, "modules": 1, "status": "finished"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With "one" loaded, and "two" and "a-reranker" beside it."""
    models = add_models(tmp_path_factory.mktemp("models"), "one", "two", "a-reranker", "broken")
    with embedding_server(
        tmp_path_factory.mktemp("server"),
        models,
        command=SCRIPTED,
        embeddings_batch_tokens=1,
        model={"use_dummy_models": True, "dummy_model_names": ["text-embedding-3-small"]},
    ) as running:
        response = running.http.post("/v1/embeddings", json={"input": "abc"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_loaded")
        assert running.http.get("/v1/model/embedding").status_code == 503
        assert running.admin.post(UNLOAD).status_code == 503
        load(running, "one")
        yield running


def test_the_loaded_model_is_shown(server: RunningServer) -> None:
    card = server.http.get("/v1/model/embedding").json()
    assert (card["id"], card["object"], card["owned_by"]) == ("one", "model", "Waypoint")
    assert card["parameters"] == {
        "kind": "embedding",
        "max_seq_len": 20,
        "dimensions": 8,
        "prompts": ["query"],
        "architecture": "Scripted",
        "device": "cpu",
        "engine_version": "1",
        "engine_state": "ready",
        "engine_failure": None,
    }


def test_an_administrator_sees_what_can_be_loaded(server: RunningServer) -> None:
    def listed(client: httpx.Client, path: str) -> list[str]:
        return [card["id"] for card in client.get(path).json()["data"]]

    assert listed(server.admin, "/v1/model/embedding/list") == ["one", "a-reranker", "broken", "two"]
    assert listed(server.http, "/v1/model/embedding/list") == ["one"]
    assert "one" in listed(server.http, "/v1/models")
    assert server.http.get("/v1/models/one").json()["status"]["value"] == "loaded"


def test_a_model_that_is_loaded_already_stays(server: RunningServer) -> None:
    before = server.state.embeddings.loaded["one"]
    response = server.admin.post(LOAD, json={"embedding_model_name": "one", "embeddings_device": None})
    assert (response.status_code, response.json()) == (200, FINISHED)
    assert server.state.embeddings.loaded["one"] is before


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "embedding_model_name"),
        ({"embedding_model_name": ""}, 400, "embedding_model_name"),
        ({"embedding_model_name": "../one"}, 400, "embedding_model_name"),
        ({"embedding_model_name": "/etc"}, 400, "embedding_model_name"),
        ({"embedding_model_name": "three"}, 404, "embedding_model_name"),
        ({"embedding_model_name": "one", "embeddings_device": "tpu"}, 400, "embeddings_device"),
        ({"embedding_model_name": "broken"}, 500, None),
    ],
)
def test_a_load_that_fails_says_why_and_leaves_what_was_there(
    server: RunningServer, body: dict[str, object], status: int, param: str | None
) -> None:
    response = server.admin.post(LOAD, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert response.json()["detail"] == response.json()["error"]["message"]
    assert list(server.state.embeddings.loaded) == ["one"]


def test_only_an_administrator_loads_and_unloads(server: RunningServer) -> None:
    assert server.http.post(LOAD, json={"embedding_model_name": "two"}).status_code == 401
    assert server.http.post(UNLOAD).status_code == 401
    assert server.anonymous.post("/v1/embeddings", json={"input": "a"}).status_code == 401


def test_the_model_of_a_request_is_one_that_is_loaded(server: RunningServer) -> None:
    for model in ("one", "", None, "text-embedding-3-small"):
        answer = server.http.post("/v1/embeddings", json={"input": "abc", "model": model})
        assert (answer.status_code, answer.json().get("model")) == (200, "one")
    for model in ("two", "nothing", "../one"):
        for path, given in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["a"]})):
            response = server.http.post(path, json={**given, "model": model})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            assert response.json()["error"]["param"] == "model"


def test_a_reranker_ranks_and_embeds_nothing(server: RunningServer) -> None:
    load(server, "a-reranker")
    body = {"query": "abc", "documents": ["x", "abc", "a"], "raw_scores": True}
    answer = server.http.post("/v1/rerank", json=body).json()
    assert answer["model"] == "a-reranker"
    assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [(1, 3.0), (2, 1.0), (0, 0.0)]
    refused = server.http.post("/v1/embeddings", json={"input": "a", "model": "a-reranker"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    unload = server.admin.post(UNLOAD, json={"embedding_model_name": "a-reranker"})
    assert (unload.status_code, unload.json()) == (200, None)
    assert list(server.state.embeddings.loaded) == ["one"]


def test_a_client_that_goes_ends_its_request(server: RunningServer) -> None:
    client = server.state.embeddings.loaded["one"]
    headers = {"Authorization": f"Bearer {API_KEY}"}
    body = {"input": ["SLOW"] * 2048}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.base_url}/v1/embeddings", json=body, headers=headers, timeout=0.3, verify=TRUSTED)
    eventually(lambda: not client._has_work)
    assert server.http.post("/v1/embeddings", json={"input": "abc"}).status_code == 200


def test_a_process_that_dies_costs_the_request_an_error_and_comes_back(server: RunningServer) -> None:
    response = server.http.post("/v1/embeddings", json={"input": ["abc", "CRASH"]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert server.http.post("/v1/embeddings", json={"input": "abc"}).status_code == 200
    assert 'waypoint_engine_restarts_total{outcome="back"} 1' in server.http.get("/metrics").text
