"""Faults that come again and again: what the server holds does not grow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.endpoints.running import RunningServer, alpha_server, eventually
from tests.faults.leaks import held_at_rest_by, held_by
from tests.scripted_worker import Play

# Of what is kept on purpose, such as the log that pytest captures, less for each crash.
KEPT_BYTES = 50_000
PROMPT = "x" * 300_000
PLAYS = [Play(when="DIE", chunks=["a"], crash_after=1), Play(when="WAIT", hang_after=0), Play()]


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def memory() -> int:
    """Bytes that Python has allocated since it is traced."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def crash(server: RunningServer, number: int) -> None:
    """The engine dies over a large request while another waits, and serves again."""
    body = {"prompt": f"WAIT {number} {PROMPT}", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as waiting:
        answer = server.http.post("/v1/completions", json={"prompt": f"DIE {number} {PROMPT}"})
        assert answer.json()["error"]["code"] == "engine_failed"
        assert '"code":"engine_failed"' in waiting.read().decode()
    chat = {"messages": [{"role": "user", "content": f"Hello {number}"}]}  # which is kept, as a turn of a conversation
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("crashes", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_crashes_leave_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (0.0,))
    monkeypatch.setattr("backends.process_client.STABLE_SECONDS", 0.0)
    with alpha_server(tmp_path_factory.mktemp("server"), PLAYS) as server, traced():
        server.load("alpha", max_seq_len=1_000_000)
        crash(server, 0)
        held, before = held_at_rest_by(server), memory()
        for number in range(1, crashes + 1):
            crash(server, number)
        eventually(lambda: held_by(server) == held)
        assert memory() - before < crashes * KEPT_BYTES
