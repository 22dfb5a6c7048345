"""Models that cannot be loaded: the reason names the file and no place of the server, and the old model serves on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Script


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("scripted"))
    for name in ("alpha", "beta"):
        engine.add_model(name)
    engine.write(Script(models={"gone": ModelScript(load_crash=True)}))
    with running_server(engine).running() as server:
        server.load("alpha")
        yield server


def link_to_itself(folder: Path) -> None:
    (folder / "config.json").unlink()
    folder.rmdir()
    try:
        folder.symlink_to(folder)
    except OSError:
        pytest.skip("links cannot be made here")


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return spoil


def make_folder(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).mkdir()


STRANGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "no-config": (lambda folder: (folder / "config.json").unlink(), 404, "There is no model 'strange'"),
    "link-to-itself": (link_to_itself, 404, "There is no model 'strange'"),
    "settings-broken": (
        write("tabby_config.yml", b"model:\n  chunk_size: 1\n\tx: 1\n"),
        400,
        "tabby_config.yml, line 3",
    ),
    "settings-binary": (write("tabby_config.yml", b"\xff\xfe\x00"), 400, "tabby_config.yml is not UTF-8"),
    "settings-list": (write("tabby_config.yml", b"- 1\n"), 400, "tabby_config.yml must hold"),
    "settings-wrong": (write("tabby_config.yml", b"model:\n  chunk_size: many\n"), 400, "chunk_size"),
    "settings-folder": (make_folder("tabby_config.yml"), 400, "tabby_config.yml cannot be read"),
}


@pytest.mark.parametrize(("spoil", "status", "what"), STRANGE.values(), ids=STRANGE)
def test_a_strange_folder_is_refused_and_the_old_model_serves(
    server: RunningServer, spoil: Callable[[Path], None], status: int, what: str
) -> None:
    folder = server.engine.add_model("strange")
    try:
        spoil(folder)
        serving = server.manager.require()
        answer = server.admin.post("/v1/model/load", json={"model_name": "strange"})
        assert answer.status_code == status, answer.text
        message = answer.json()["error"]["message"]
        assert what in message
        assert str(server.engine.root) not in message
        assert server.manager.require() is serving
        assert server.admin.get("/v1/models").status_code == 200
        assert server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        return
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_folder_that_is_not_ours_to_read(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.listdir

    def refuse(path: str | Path) -> list[str]:
        if Path(path) == server.manager.model_dir:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("os.listdir", refuse)
    names = [card["id"] for card in server.admin.get("/v1/models").json()["data"]]
    assert names == ["alpha"]


def test_what_a_crash_in_a_load_leaves(server: RunningServer) -> None:
    """The engine's last words are no place to name files either."""
    folder = server.engine.add_model("gone")
    answer = server.admin.post("/v1/model/load", json={"model_name": "gone"})
    error = json.loads(answer.text.split("data: ")[-2]) if "data: " in answer.text else answer.json()
    assert "ended with code 24" in error["error"]["message"]
    assert "The previous model alpha is loaded again" in error["error"]["message"]
    assert server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    remove(folder)
