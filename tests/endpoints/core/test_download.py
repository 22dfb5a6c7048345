"""Downloads over HTTP, from a stand-in for the hub."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common import downloader
from common.downloader import STAGING_PREFIX
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.hub import HubStandIn, Repo
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

REPO = "owner/name"
WEIGHTS = "model.safetensors"
BLOCK = 1 << 20
FILES = {"config.json": b"{}", "sub/notes.txt": b"notes", WEIGHTS: random.Random(0).randbytes(2 * BLOCK)}


def downloading_server(root: Path) -> RunningServer:
    engine = ScriptedEngine(root)
    engine.add_model("alpha")
    engine.write(Script())
    return running_server(engine, model={"model_dir": str(engine.model_dir)}, lora={"lora_dir": str(root / "loras")})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with downloading_server(tmp_path_factory.mktemp("server")).running() as running:
        yield running


@pytest.fixture(autouse=True)
def repository(hub: HubStandIn) -> None:
    hub.repos[REPO] = Repo(dict(FILES))


def ask(server: RunningServer, name: str, **body: object) -> httpx.Response:
    return server.admin.post("/v1/download", json={"repo_id": REPO, "folder_name": name, **body})


def folders(server: RunningServer) -> set[str]:
    return {path.name for path in server.engine.model_dir.iterdir()}


def card_of(server: RunningServer, identifier: str) -> dict[str, Any] | None:
    cards = server.admin.get("/v1/downloads").json()["data"]
    found = [card for card in cards if card["id"] == identifier]
    assert len(found) <= 1
    return found[0] if found else None


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_download_is_answered_when_it_is_complete(server: RunningServer) -> None:
    response = ask(server, "whole", include=["*.json", "*.safetensors"], exclude=["sub/*"], chunk_limit=1, token=None)
    folder = server.engine.model_dir / "whole"
    assert (response.status_code, response.json()) == (200, {"download_path": str(folder)})
    assert files_in(folder) == {name: content for name, content in FILES.items() if name != "sub/notes.txt"}
    assert folders(server) >= {"whole", "alpha"}
    assert not any(name.startswith(".") for name in folders(server))
    assert "whole" in [card["id"] for card in server.admin.get("/v1/models").json()["data"]]
    card = card_of(server, "model/whole")
    assert card is not None
    assert (card["state"], card["error"], card["download_path"]) == ("finished", None, str(folder))
    response = ask(server, "whole")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    assert response.json()["error"]["param"] == "folder_name"
    assert server.admin.delete("/v1/downloads/model/whole").status_code == 200
    assert folder.is_dir()
    assert card_of(server, "model/whole") is None


def test_a_stream_tells_the_progress_and_ends_with_the_answer(server: RunningServer) -> None:
    response = ask(server, "streamed", stream=True)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *data, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    *events, answer = map(json.loads, data)
    assert done == "[DONE]"
    assert answer == {"download_path": str(server.engine.model_dir / "streamed")}
    total = sum(map(len, FILES.values()))
    assert [event["bytes"] for event in events] == sorted(event["bytes"] for event in events)
    assert (events[-1]["phase"], events[-1]["bytes"], events[-1]["files_done"]) == ("verifying", total, 3)
    assert {event["total"] for event in events} == {total}
    assert {event["file"] for event in events} <= FILES.keys()


def test_what_is_refused_soon_is_no_stream(server: RunningServer, hub: HubStandIn) -> None:
    del hub.repos[REPO]
    body = {"repo_id": REPO, "folder_name": "missing"}
    response = server.admin.post("/v1/download", json=body, headers={"Accept": "text/event-stream"})
    events = [line for line in response.text.splitlines() if line.startswith("data: ")]
    # On a machine that is slow to begin, it is an error in the stream.
    error = json.loads(events[0].removeprefix("data: ")) if events else response.json()
    assert error["error"]["param"] == "repo_id"
    assert "There is no model owner/name" in error["detail"]
    assert events or response.status_code == 404
    card = card_of(server, "model/missing")
    assert card is not None
    assert (card["state"], card["error"]) == ("failed", error["detail"])
    assert STAGING_PREFIX + "missing" not in folders(server)


def test_a_cancelled_download_leaves_nothing(
    server: RunningServer, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults[WEIGHTS] = ["stall"]
    response = ask(server, "cancelled", detach=True)
    assert (response.status_code, response.json()["id"]) == (202, "model/cancelled")
    assert hub.stalled.wait(60)
    eventually(lambda: (card_of(server, "model/cancelled") or {})["progress"]["bytes"] > BLOCK)
    assert (card_of(server, "model/cancelled") or {})["state"] == "downloading"
    assert "cancelled" not in folders(server)
    assert "cancelled" not in [card["id"] for card in server.admin.get("/v1/models").json()["data"]]
    response = ask(server, "cancelled")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    monkeypatch.setattr(downloader, "MAX_RUNNING", 1)
    assert ask(server, "another").status_code == 429
    assert server.admin.delete("/v1/downloads/model/cancelled").status_code == 200
    assert not {"cancelled", STAGING_PREFIX + "cancelled"} & folders(server)
    response = server.admin.delete("/v1/downloads/model/cancelled")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_a_client_that_goes_ends_its_download_which_goes_on_when_asked_again(
    server: RunningServer, hub: HubStandIn
) -> None:
    hub.faults[WEIGHTS] = ["stall"]
    with server.admin.stream("POST", "/v1/download", json={"repo_id": REPO, "folder_name": "gone", "stream": True}):
        assert hub.stalled.wait(60)
        eventually(lambda: (card_of(server, "model/gone") or {})["progress"]["bytes"] > BLOCK)
    eventually(lambda: (card_of(server, "model/gone") or {})["state"] == "failed")
    assert {"gone", STAGING_PREFIX + "gone"} & folders(server) == {STAGING_PREFIX + "gone"}
    hub.asked.clear()
    assert ask(server, "gone").status_code == 200
    assert {(asked.path, asked.start) for asked in hub.asked} == {(WEIGHTS, BLOCK), (f"storage/{WEIGHTS}", BLOCK)}
    assert files_in(server.engine.model_dir / "gone") == FILES


def test_what_a_failed_download_has_left_can_be_removed(server: RunningServer) -> None:
    left = server.engine.model_dir / (STAGING_PREFIX + "left")
    left.mkdir()
    (left / ("0" * 64 + ".incomplete")).write_bytes(b"x")
    assert server.admin.delete("/v1/downloads/model/left").status_code == 200
    assert not left.exists()


def test_other_types_go_to_their_folders_and_a_timeout_ends_it(server: RunningServer, hub: HubStandIn) -> None:
    hub.faults[WEIGHTS] = ["stall"]
    response = ask(server, "adapter", repo_type="lora", timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "download_failed")
    assert "took longer than its timeout of 0.05 s" in response.json()["detail"]
    card = card_of(server, "lora/adapter")
    assert card is not None
    assert card["download_path"] == str(server.engine.root / "loras" / "adapter")


def test_a_process_that_fails_is_told(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(downloader, "PROJECT_ROOT", server.engine.root)  # where there is no such module
    response = ask(server, "broken")
    assert response.status_code == 500
    assert "ended with code 1. The log says more" in response.json()["detail"]
    assert any("common.hub_files" in line for line in log_lines)


@pytest.mark.slow
def test_a_server_that_stops_ends_its_downloads(tmp_path: Path, hub: HubStandIn) -> None:
    hub.faults[WEIGHTS] = ["stall"]
    answers: list[httpx.Response] = []
    with downloading_server(tmp_path).running() as server:
        asking = threading.Thread(target=lambda: answers.append(ask(server, "name")))
        asking.start()
        assert hub.stalled.wait(60)
        server.stop()
        server.join()
        asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "request_cancelled")
    assert folders(server) == {"alpha", STAGING_PREFIX + "name"}


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../out", "a/b", "a\\b", "/tmp/out", "C:out", "nul", "com1.txt", ".hidden", "a\0b", "é" * 101],
)
def test_names_that_are_no_new_folder(server: RunningServer, name: str) -> None:
    response = ask(server, name)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "folder_name")
    path = "/v1/downloads/model/" + name.replace("/", "%2F").replace("\0", "%00")
    assert server.admin.delete(path).status_code in (400, 404, 405)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"repo_id": "owner/.."}, "repo_id"),
        ({"repo_id": ""}, "repo_id"),
        ({}, "repo_id"),
        ({"repo_id": REPO, "token": "two words"}, "token"),
        ({"repo_id": REPO, "token": "é"}, "token"),
        ({"repo_id": REPO, "revision": "a\nb"}, "revision"),
        ({"repo_id": REPO, "exclude": ["a\0"]}, "exclude"),
        ({"repo_id": REPO, "include": "*.json"}, "include"),
        ({"repo_id": REPO, "repo_type": "dataset"}, "repo_type"),
        ({"repo_id": REPO, "timeout": 0}, "timeout"),
    ],
)
def test_bodies_that_ask_for_nothing(server: RunningServer, body: dict[str, object], param: str) -> None:
    response = server.admin.post("/v1/download", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "words" not in response.text or param != "token"


def test_only_administrators_download(server: RunningServer) -> None:
    for method, path in (("POST", "/v1/download"), ("GET", "/v1/downloads"), ("DELETE", "/v1/downloads/model/x")):
        assert server.http.request(method, path).status_code == 401
