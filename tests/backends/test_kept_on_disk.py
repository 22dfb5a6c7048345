"""The disk tier over HTTP: what is cached outlives the model, the server, and the engine's death."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ServerProcess, served

PROMPT = [5 + i % 900 for i in range(800)]
FULL_PAGES = 768
pytestmark = pytest.mark.slow  # tests/backends/exllamav3/test_tiers.py has the same within one process

# The folder is relative to the server's working directory; every checkpoint is kept.
DISK = ("--disk-cache-dir", "kept/on disk", "--disk-cache-checkpoint-interval", "0", "--sysmem-kv-cache", "32")
SMALL = ("--cache-size", "4096", "--max-seq-len", "4096")


@dataclass
class Completion:
    text: str
    cached_tokens: int


def complete(server: ServerProcess, prompt: list[int] = PROMPT) -> Completion:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return Completion(body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"])


def post(server: ServerProcess, path: str, **body: object) -> None:
    with server.client(server.admin_key) as client:
        client.post(path, json=body).raise_for_status()


def load(server: ServerProcess, name: str) -> None:
    post(server, "/v1/model/load", model_name=name, cache_size=4096, max_seq_len=4096)


def test_a_prompt_resumes_after_a_restart_of_the_server(tmp_path: Path, tiny_hybrid: Path) -> None:
    with served(tmp_path, *DISK, *SMALL, model=tiny_hybrid) as server:
        cold = complete(server)
        assert cold.cached_tokens == 0
    assert (tmp_path / "kept" / "on disk").is_dir()
    with served(tmp_path, *DISK, *SMALL, model=tiny_hybrid) as server:
        assert complete(server) == Completion(cold.text, FULL_PAGES)


def test_a_prompt_resumes_after_a_load_and_after_another_model(
    tmp_path: Path, tiny_hybrid: Path, tiny_llama: Path
) -> None:
    """Each model has the files that it has written, in the folder that both use."""
    with served(tmp_path, *DISK, *SMALL, model=tiny_hybrid) as server:
        first = complete(server)
        post(server, "/v1/model/unload")
        load(server, tiny_hybrid.name)
        assert complete(server) == Completion(first.text, FULL_PAGES)
        load(server, tiny_llama.name)
        second = complete(server)
        assert second.cached_tokens == 0
        assert second.text != first.text
        for name, text in ((tiny_hybrid.name, first.text), (tiny_llama.name, second.text)):
            load(server, name)
            assert complete(server) == Completion(text, FULL_PAGES)


def engine_process(server: ServerProcess) -> int:
    """Id of the engine's process, the server's only child."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text(encoding="utf-8")
    (child,) = children.split()
    return int(child)


def written(folder: Path, suffix: str) -> int:
    return sum(1 for _ in folder.rglob(f"*.{suffix}"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine's process as on Linux")
def test_a_killed_engine_goes_on_with_what_it_had_written(tmp_path: Path, tiny_hybrid: Path) -> None:
    prompt = [5 + i % 900 for i in range(8_000)]
    dense = ("--chunk-size", "256", "--recurrent-checkpoint-interval-pp", "256", "--disk-cache-write-interval", "0.05")
    body = {"prompt": prompt, "max_tokens": 4, "stream": True}
    with served(tmp_path, *DISK, *dense, model=tiny_hybrid) as server:
        folder = tmp_path / "kept"
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            while (kept := written(folder, "rs")) < 4:
                time.sleep(0.01)
            os.kill(engine_process(server), signal.SIGKILL)
            assert '"error"' in answer.read().decode()
        assert kept * 256 <= complete(server, prompt).cached_tokens < len(prompt) - 1000
