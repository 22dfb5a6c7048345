"""The real engine's process runs out of memory, hangs, is killed, or cannot load, under the whole server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.caching import CacheState
from tests.endpoints.running import API_KEY, RunningServer, eventually, running_server
from tests.faults import engine_worker as faults
from tests.faults.leaks import held_at_rest_by, held_by
from tests.scripted import ScriptedEngine

SMALL = {"cache_size": 4096, "max_seq_len": 4096, "chunk_size": 256, "max_batch_size": 2}
# Longer than a process takes to start on a busy machine.
ENGINE_TIMEOUT = 20


class RealEngine(ScriptedEngine):
    """Folders of real models, and a worker that reads no script."""

    @property
    def faults(self) -> Path:
        return self.root / "faults"

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "tests.faults.engine_worker", str(self.faults))


@dataclass
class FaultyServer:
    """A server whose engine can be made to fail."""

    server: RunningServer
    faults: Path

    def arm(self, fault: str) -> None:
        (self.faults / fault).touch()

    def happened(self, fault: str) -> bool:
        return not (self.faults / fault).exists()

    def ask(self, prompt: str, max_tokens: int = 4, **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.server.http.post("/v1/completions", json=body)

    def error(self, prompt: str, **fields: Any) -> dict[str, Any]:
        answer = self.ask(prompt, **fields)
        assert answer.status_code == 500, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    def serves(self) -> bool:
        return self.ask("Once upon a time").status_code == 200

    def start(self, prompt: str, max_tokens: int, stream: bool) -> socket.socket:
        """Send a request and read nothing."""
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
        url = httpx.URL(self.server.base_url)
        assert url.port is not None
        connection = socket.create_connection((url.host, url.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {API_KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection

    @property
    def process(self) -> int:
        process = self.server.manager.require()._process
        assert process is not None
        return process.pid

    def kill(self) -> None:
        async def kill() -> None:
            process = self.server.manager.require()._process
            assert process is not None
            process.kill()

        self.server.call(kill())

    def state(self) -> CacheState:
        return self.server.call(self.server.manager.require().inspect())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, tiny_hybrid: Path, tiny_llama: Path) -> Iterator[FaultyServer]:
    engine = RealEngine(tmp_path_factory.mktemp("real"))
    engine.faults.mkdir()
    for model in (tiny_hybrid, tiny_llama):
        shutil.copytree(model, engine.model_dir / model.name)
    memory = {"sysmem_kv_cache": 32, "disk_cache_dir": str(engine.root / "disk"), "disk_cache_write_interval": 0.01}
    with running_server(engine, network={"engine_timeout": ENGINE_TIMEOUT}, memory=memory).running() as server:
        server.load(tiny_hybrid.name, **SMALL)
        yield FaultyServer(server, engine.faults)


@pytest.fixture
def faulty(started: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """The engine may fail as often as it likes, and nothing of a test is left in it or in the server."""
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    monkeypatch.setattr("backends.process_client.STABLE_SECONDS", 0.0)
    assert started.serves()
    held = held_at_rest_by(started.server)
    yield started
    for fault in started.faults.iterdir():
        fault.unlink()
    assert started.serves()
    client = started.server.manager.require()
    eventually(lambda: not client._has_work)
    state = started.state()
    assert (state.active_requests, state.queued_requests) == (0, 0)
    assert {tier.active_tokens for tier in state.tiers} == {0}
    eventually(lambda: held_by(started.server) == held)


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [faults.PREFILL_OUT_OF_MEMORY, pytest.param(faults.START_OUT_OF_MEMORY, marks=pytest.mark.slow)]
)
def test_memory_that_runs_out_over_a_prompt_is_an_error_of_that_request(faulty: FaultyServer, fault: str) -> None:
    process = faulty.process
    other: list[httpx.Response] = []
    faulty.arm(faults.DECODE_IS_SLOW)
    beside = threading.Thread(target=lambda: other.append(faulty.ask("Hello", max_tokens=40)))
    beside.start()
    eventually(lambda: faulty.state().active_requests == 1)
    faulty.arm(fault)
    error = faulty.error(words(300))
    assert error["code"] == "engine_out_of_memory"
    assert "chunk_size, cache_size or max_batch_size" in error["message"]
    assert "CUDA" not in error["message"]
    beside.join()
    assert other[0].status_code == 200
    assert other[0].json()["usage"]["completion_tokens"] == 40
    assert faulty.process == process


def test_memory_that_runs_out_for_all_starts_the_engine_anew(faulty: FaultyServer) -> None:
    process = faulty.process
    faulty.arm(faults.DECODE_OUT_OF_MEMORY)
    assert faulty.error("Hello")["code"] == "engine_out_of_memory"
    eventually(lambda: faulty.server.manager.require().state != "ready")
    assert faulty.serves()
    assert faulty.process != process


@pytest.mark.slow
def test_memory_that_runs_out_in_a_load_brings_the_previous_model_back(
    faulty: FaultyServer, tiny_llama: Path, tiny_hybrid: Path
) -> None:
    faulty.arm(faults.LOAD_OUT_OF_MEMORY)
    answer = faulty.server.admin.post("/v1/model/load", json={"model_name": tiny_llama.name, **SMALL})
    assert "there is not enough memory to load it. Lower cache_size" in answer.text
    assert f"The previous model {tiny_hybrid.name} is loaded again" in answer.text
    assert faulty.serves()


# --- disks and files --------------------------------------------------------------------------------------------------


def test_a_full_disk_under_the_cache_is_a_warning(faulty: FaultyServer, log_lines: list[str]) -> None:
    faulty.arm(faults.DISK_FULL)
    for _ in range(2):
        assert faulty.ask(words(350)).status_code == 200
    client = faulty.server.manager.require()
    flushed = faulty.server.call(client.flush_cache())
    assert (flushed.pages, flushed.checkpoints) == (0, 0)
    eventually(lambda: any("No space left on device" in line for line in log_lines))
    assert faulty.serves()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        ("cut", "model.safetensors of damaged is cut off or damaged"),
        ("renamed", "damaged: ValueError: .* not found in any .*Its files may be damaged.*is loaded again"),
    ],
)
def test_a_damaged_model_leaves_the_old_one(faulty: FaultyServer, tiny_llama: Path, spoil: str, what: str) -> None:
    engine = faulty.server.engine
    folder = engine.model_dir / "damaged"
    shutil.copytree(tiny_llama, folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1000] if spoil == "cut" else content.replace(b"layers.3.", b"layers.9."))
    try:
        answer = faulty.server.admin.post("/v1/model/load", json={"model_name": "damaged", **SMALL})
        assert re.search(what, answer.text)
        assert str(engine.root) not in answer.text
        assert faulty.serves()
    finally:
        shutil.rmtree(folder)


# --- hanging and killed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_killed_while_it_reads_a_prompt(faulty: FaultyServer) -> None:
    faulty.arm(faults.PREFILL_HANGS)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(faulty.ask(words(300), stream=True)))
    asking.start()
    eventually(lambda: faulty.happened(faults.PREFILL_HANGS))
    assert faulty.server.http.get("/health").status_code == 200
    faulty.kill()
    asking.join()
    assert '"code":"engine_failed"' in answers[0].text
    assert "killed from outside" in answers[0].text
    assert answers[0].text.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_an_engine_killed_while_it_answers(faulty: FaultyServer) -> None:
    faulty.arm(faults.DECODE_IS_SLOW)
    body = {"prompt": "Hello", "max_tokens": 1000, "stream": True}
    with faulty.server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            assert '"text"' in next(lines)
        faulty.kill()
        *_, error, done = lines
    assert '"code":"engine_failed"' in error
    assert done == "data: [DONE]"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [faults.PREFILL_HANGS, faults.DECODE_HANGS])
def test_an_engine_that_hangs(faulty: FaultyServer, fault: str) -> None:
    process = faulty.process
    faulty.arm(fault)
    error = faulty.error(words(300))
    assert error["code"] == "engine_hangs"
    assert f"no progress for {ENGINE_TIMEOUT} s (network.engine_timeout)" in error["message"]
    assert faulty.serves()
    assert faulty.process != process


# --- clients that go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", ["sent", "queued", "prefill", "decode"])
def test_a_client_that_goes_leaves_nothing_in_the_engine(faulty: FaultyServer, stage: str, stream: bool) -> None:
    """What is left is looked for after each test here."""
    faulty.arm(faults.PREFILL_IS_SLOW if stage == "prefill" else faults.DECODE_IS_SLOW)
    busy = [faulty.start("Hello", 3000, stream) for _ in range(SMALL["max_batch_size"])] if stage == "queued" else []
    eventually(lambda: faulty.state().active_requests == len(busy))
    client = faulty.start(words(300) if stage == "prefill" else "Hello", 3000, stream)
    if stage == "queued":
        eventually(lambda: faulty.state().queued_requests == 1)
    elif stage != "sent":
        eventually(lambda: faulty.state().active_requests == 1)
    if stage == "decode" and stream:
        while b'"text"' not in client.recv(1 << 16):
            pass
    client.close()
    eventually(lambda: (faulty.state().queued_requests, faulty.state().active_requests) == (0, len(busy)))
    for other in busy:
        other.close()


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_changes_no_duration(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards and forwards, in the engine's process and in the server's."""
    faulty.arm(faults.CLOCK_JUMPS)
    jumps = faults.jumping_clock(lambda: True)
    monkeypatch.setattr("time.time", jumps)
    answer = faulty.ask(words(300), max_tokens=8, stream=True, stream_options={"include_usage": True})
    assert answer.text.rstrip().endswith("data: [DONE]")
    answer = faulty.ask(words(301), max_tokens=8)
    usage = answer.json()["usage"]
    times = {key: value for key, value in usage.items() if key.endswith("_time")}
    assert times
    assert all(0 <= value < 600 for value in times.values()), times
    assert faulty.serves()
