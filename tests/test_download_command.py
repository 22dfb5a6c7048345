"""`python main.py download`, from a stand-in for the hub."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

import main
from tests.endpoints.running import eventually
from tests.hub import HubStandIn, Repo
from tests.serving import MAIN, served

REPO = "owner/name"
WEIGHTS = "model.safetensors"
FILES = {"config.json": b"{}", WEIGHTS: random.Random(0).randbytes(2 << 20)}


@pytest.fixture
def folder(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_put_back: None) -> Path:
    """Where the command runs: its models go to the folder "my-models"."""
    hub.repos[REPO] = Repo(dict(FILES))
    (tmp_path / "config.yml").write_text("model:\n  model_dir: my-models\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_new_folder_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["download", REPO, "--include", "*.json", "*.txt", "--exclude", "x*"]) == 0
    printed = capsys.readouterr()
    assert printed.out == str(Path("my-models", "name")) + "\n"
    assert "100%" in printed.err or "2/2 bytes" in printed.err
    assert files_in(folder / "my-models") == {"name/config.json": b"{}"}
    assert not (folder / "logs").exists()


def test_what_cannot_be_downloaded_ends_it_with_the_reason(
    folder: Path, hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["download", REPO, "--folder-name", "../name"]) == main.EXIT_SETTINGS
    assert "'../name' is no name for a new folder" in capsys.readouterr().err
    hub.status = 500
    assert main.main(["download", REPO, "--type", "lora"]) == main.EXIT_FAILED
    assert "answers with 500" in capsys.readouterr().err
    assert not (folder / "my-models").exists()
    assert not (folder / "loras").exists()


@pytest.mark.slow
def test_an_interrupted_download_goes_on_with_the_same_command(folder: Path, hub: HubStandIn) -> None:
    hub.faults[WEIGHTS] = ["stall"]
    command = [*MAIN, "download", REPO, "--folder-name", "mine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    eventually(lambda: any(path.stat().st_size for path in folder.rglob("*.incomplete")))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (main.EXIT_INTERRUPTED, "")
    assert "the same command goes on from there" in errors
    assert [path.name for path in (folder / "my-models").iterdir()] == [".downloading-mine"]
    hub.asked.clear()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, str(Path("my-models", "mine")) + "\n"), done.stderr
    assert files_in(folder / "my-models" / "mine") == FILES
    assert {asked.start for asked in hub.asked} == {1 << 20}


@pytest.mark.slow
def test_a_downloaded_model_is_served(folder: Path, hub: HubStandIn, tiny_llama: Path) -> None:
    hub.repos[REPO] = Repo({path.name: path.read_bytes() for path in tiny_llama.iterdir()})
    with served(folder, ready=False) as server, server.client(server.admin_key) as admin:
        assert admin.post("/v1/download", json={"repo_id": REPO}).status_code == 200
        response = admin.post("/v1/model/load", json={"model_name": "name"})
        assert '"status":"finished"' in response.text, response.text
        body = {"prompt": "one two", "max_tokens": 3, "ignore_eos": True}
        assert admin.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
