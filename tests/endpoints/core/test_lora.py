from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.common.test_names import HOSTILE_NAMES
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.serving import served

REFUSED = {"elsewhere": "The adapter elsewhere does not fit alpha.", "broken": "The adapter broken is incomplete."}
# `SLOW` runs long enough for a change to come meanwhile.
PLAYS = [Play(when="SLOW", chunks=["a"] * 5, delay=0.1), Play(when="CRASH", crash_after=0)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    return ScriptedEngine(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    engine.add_model("alpha")
    engine.write(Script(plays=PLAYS, models={"alpha": ModelScript(refused_loras=REFUSED)}))
    lora_dir = engine.root / "loras"
    for name in ("poet", "clerk"):
        (lora_dir / name).mkdir(parents=True)
        (lora_dir / name / "adapter_config.json").write_text("{}", encoding="utf-8")
    (lora_dir / "no adapter").mkdir()
    with running_server(engine, lora={"lora_dir": str(lora_dir)}).running() as running:
        running.load("alpha")
        yield running


@pytest.fixture(autouse=True)
def without_adapters(server: RunningServer) -> Iterator[None]:
    yield
    assert server.admin.post("/v1/lora/unload").status_code == 200


def load(server: RunningServer, *loras: dict[str, Any], **fields: object) -> Any:
    response = server.admin.post("/v1/lora/load", json={"loras": loras, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def applied(server: RunningServer) -> dict[str, float]:
    cards = server.http.get("/v1/lora").json()["data"]
    return {card["id"]: card["scaling"] for card in cards}


def test_adapters_are_loaded_listed_and_unloaded(server: RunningServer) -> None:
    assert load(server, {"name": "poet"}) == {"success": ["poet"], "failure": [], "errors": {}}
    load(server, {"name": "clerk", "scaling": 0.5}, skip_queue=True)
    assert applied(server) == {"poet": 1.0, "clerk": 0.5}
    load(server, {"name": "poet", "scaling": None}, {"name": "clerk", "scaling": 2}, skip_queue=None)
    assert applied(server) == {"poet": 1.0, "clerk": 2.0}
    response = server.admin.post("/v1/lora/unload")
    assert (response.status_code, response.json()) == (200, None)
    assert applied(server) == {}


@pytest.mark.parametrize("path", ["/v1/loras", "/v1/lora/list"])
def test_an_administrator_sees_the_folder_and_others_what_is_applied(path: str, server: RunningServer) -> None:
    load(server, {"name": "poet", "scaling": 0.25})
    body = server.admin.get(path).json()
    assert body["object"] == "list"
    assert [(card["id"], card["scaling"]) for card in body["data"]] == [("poet", 0.25), ("clerk", None)]
    assert {(card["object"], card["owned_by"]) for card in body["data"]} == {("lora", "Waypoint")}
    assert all(card["created"] > 0 for card in body["data"])
    assert [card["id"] for card in server.http.get(path).json()["data"]] == ["poet"]


def test_what_cannot_be_applied_is_told_beside_what_was(server: RunningServer) -> None:
    answer = load(server, {"name": "elsewhere"}, {"name": "poet"}, {"name": "broken"})
    assert answer == {"success": ["poet"], "failure": ["elsewhere", "broken"], "errors": REFUSED}
    assert applied(server) == {"poet": 1.0}


def test_where_nothing_can_be_applied_nothing_changes(server: RunningServer) -> None:
    load(server, {"name": "poet"})
    response = server.admin.post("/v1/lora/load", json={"loras": [{"name": "elsewhere"}, {"name": "broken"}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == "\n".join(REFUSED.values())
    assert error["param"] == "loras.0.name"
    assert applied(server) == {"poet": 1.0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "loras"),
        ({"loras": None}, "loras"),
        ({"loras": []}, "loras"),
        ({"loras": [{}]}, "loras.0.name"),
        ({"loras": [{"name": 1}]}, "loras.0.name"),
        ({"loras": [{"name": "poet", "scaling": -1}]}, "loras.0.scaling"),
        ({"loras": [{"name": "poet", "scaling": True}]}, "loras.0.scaling"),
        ({"loras": [{"name": "poet"}, {"name": "poet", "scaling": 0}]}, "loras"),
        ({"loras": [{"name": "poet"}] * 65}, "loras"),
    ],
)
def test_bodies_that_cannot_be_read(server: RunningServer, body: dict[str, object], param: str) -> None:
    response = server.admin.post("/v1/lora/load", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_only_an_administrator_changes_adapters(server: RunningServer) -> None:
    for path, body in (("/v1/lora/load", {"loras": [{"name": "poet"}]}), ("/v1/lora/unload", None)):
        assert server.http.post(path, json=body).status_code == 401
        assert server.anonymous.post(path, json=body).status_code == 401
    for path in ("/v1/lora", "/v1/loras"):
        assert server.anonymous.get(path).status_code == 401


def test_a_request_in_flight_is_finished_before_a_change(server: RunningServer) -> None:
    answers: list[Any] = []

    def ask() -> None:
        answers.append(server.http.post("/v1/completions", json={"prompt": "SLOW", "max_tokens": 20}).json())

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server.requests_in_engine == 1)
    load(server, {"name": "poet"})
    assert server.idle()
    asking.join()
    assert answers[0]["choices"][0]["text"] == "aaaaa"


def test_an_adapter_that_was_lost_in_a_crash_is_told_of(server: RunningServer, engine: ScriptedEngine) -> None:
    lost = {"poet": "There is no adapter 'poet'."}
    load(server, {"name": "poet"}, {"name": "clerk"})
    engine.write(Script(plays=PLAYS, models={"alpha": ModelScript(refused_loras=lost)}))
    assert server.http.post("/v1/completions", json={"prompt": "CRASH"}).status_code == 500
    assert server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    for path in ("/v1/lora", "/v1/loras"):
        cards = server.http.get(path).json()["data"]
        assert [(card["id"], card["scaling"], card["error"]) for card in cards] == [
            ("clerk", 1.0, None),
            ("poet", None, lost["poet"]),
        ]
    parameters = server.http.get("/v1/model").json()["parameters"]
    assert parameters["loras"] == [{"name": "clerk", "scaling": 1.0}]
    assert any("without the adapter poet" in warning for warning in parameters["warnings"])


def test_without_a_model_there_is_nothing_to_apply_to(empty_server: RunningServer) -> None:
    assert empty_server.admin.get("/v1/loras").json() == {"object": "list", "data": []}
    assert empty_server.admin.get("/v1/lora").status_code == 503
    for path, body in (("/v1/lora/load", {"loras": [{"name": "poet"}]}), ("/v1/lora/unload", None)):
        response = empty_server.admin.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_loaded")


# --- on the real engine -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_at_start_and_of_another_model(tiny_llama: Path, tiny_hybrid: Path, tmp_path: Path) -> None:
    """`lora.loras` for the model loaded at start; names stay in the folder; answers change with what is applied."""
    make_adapter(tmp_path / "loras" / "poet", tiny_llama)
    make_adapter(tmp_path / "loras" / "stranger", tiny_hybrid, ["in_proj_qkv"])
    asked = {"prompt": "def f(x):\n" * 40, "max_tokens": 8, "temperature": 0}
    with (
        served(tmp_path, "--loras", '[{"name": "poet", "scaling": 0.5}]', model=tiny_llama) as server,
        server.client(server.admin_key) as admin,
    ):

        def tell() -> tuple[str, int]:
            answer = admin.post("/v1/completions", json=asked).json()
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [card["scaling"] for card in admin.get("/v1/lora").json()["data"]] == [0.5]
        assert admin.get("/v1/model").json()["parameters"]["loras"] == [{"name": "poet", "scaling": 0.5}]
        first, _ = tell()
        assert admin.post("/v1/lora/unload").status_code == 200
        plain, cached = tell()
        assert (plain != first, cached) == (True, 0)
        for name in ["stranger", "nobody", *HOSTILE_NAMES]:
            if "\ud83d" in name or "\udcff" in name:  # no JSON
                continue
            response = admin.post("/v1/lora/load", json={"loras": [{"name": name}]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "loras.0.name"), name
            assert str(tmp_path) not in response.text
        assert admin.get("/v1/lora").json()["data"] == []
        assert tell()[0] == plain
        loaded = admin.post("/v1/lora/load", json={"loras": [{"name": "poet", "scaling": 0.5}, {"name": "nobody"}]})
        assert loaded.json()["success"] == ["poet"]
        assert tell()[0] == first
