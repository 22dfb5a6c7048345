"""Signals to the program: what is served ends in order, a second signal ends it at once, and no process is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from main import EXIT_INTERRUPTED
from tests.endpoints.running import CHATML, eventually
from tests.faults.leaks import children
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.serving import ROOT, ServerProcess, served

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

PLAYS = [
    Play(when="SHORT", chunks=["one ", "two ", "three"], delay=0.4),
    Play(when="STALL", chunks=["a "], hang_after=1),
    Play(when="HANG", hang_after=0),
    Play(when="BLOCK", busy=600.0),
]
MODELS = {"slow": ModelScript(load_seconds=600.0, modules=1000)}
# Of the process, before it is no longer waited for. Nothing here depends on how long it takes.
EXIT_SECONDS = 60
STATUS = {signal.SIGTERM: 0, signal.SIGINT: EXIT_INTERRUPTED}
both_signals = pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Program:
    """A server that is told to stop.

    Attributes:
        engines: processes that it had started before.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.engines: list[int] = []

    def send(self, sent: signal.Signals) -> None:
        self.engines += children(self.server.process.pid)
        self.server.process.send_signal(sent)

    def status(self) -> int:
        """Its exit status, once it has ended and left no process behind."""
        status = self.server.process.wait(EXIT_SECONDS)
        assert self.engines or sys.platform != "linux"
        eventually(lambda: not any(map(exists, self.engines)))
        assert not any("Traceback" in line for line in self.server.log), "\n".join(self.server.log)
        return status


@contextmanager
def program(
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    model: str = "alpha",
    *,
    shutdown_timeout: int = 600,
    template: str = CHATML,
) -> Iterator[Program]:
    """The program over the scripted engine. Unless said otherwise, tests that wait for the time-out hang."""
    scripted.write(Script(plays=PLAYS, models=MODELS))
    directory = scripted.model_dir / model
    directory.mkdir(exist_ok=True)
    for name, text in (("config.json", "{}"), ("chat_template.jinja", template)):
        (directory / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with served(
        scripted.root,
        *("--shutdown-timeout", str(shutdown_timeout)),
        model=directory,
        ready=model != "slow",
        program=(sys.executable, "-m", "tests.faults.scripted_main", str(scripted.script_path)),
    ) as server:
        yield Program(server)


@contextmanager
def streaming(server: ServerProcess, prompt: str) -> Iterator[Iterator[str]]:
    """The lines of a stream, whose first has come where the prompt has an answer."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        if prompt in ("SHORT", "STALL"):
            next(lines)
        yield lines


@both_signals
def test_what_is_in_flight_is_finished_and_nothing_else_begun(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    with program(scripted, monkeypatch) as stopping, stopping.server.client() as client:
        assert client.get("/ready").status_code == 200  # opens the connection
        with streaming(stopping.server, "SHORT") as lines:
            stopping.send(sent)
            eventually(lambda: any("in flight" in line for line in stopping.server.log))
            refused = client.post("/v1/completions", json={"prompt": "hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "request_cancelled")
            assert "shutting down" in refused.json()["error"]["message"]
            assert refused.headers["Connection"] == "close"
            assert int(refused.headers["Retry-After"]) > 0
            with pytest.raises(httpx.ConnectError):
                client.get("/health")
            *_, last, done = lines
            assert '"finish_reason":"stop"' in last
            assert done == "data: [DONE]"
        assert stopping.status() == STATUS[sent]


@pytest.mark.slow
def test_probes_while_it_shuts_down(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with program(scripted, monkeypatch) as stopping, stopping.server.client() as client:
        assert client.get("/health").status_code == 200
        with streaming(stopping.server, "SHORT"):
            stopping.send(signal.SIGTERM)
            eventually(lambda: any("in flight" in line for line in stopping.server.log))
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
        assert stopping.status() == 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["STALL", "HANG", "BLOCK"])
def test_what_takes_too_long_ends_with_an_event(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    with program(scripted, monkeypatch, shutdown_timeout=1) as stopping:
        with streaming(stopping.server, prompt) as lines:
            stopping.send(signal.SIGTERM)
            error, done = lines
            assert '"code":"request_cancelled"' in error
            assert "shutting down" in error
            assert done == "data: [DONE]"
        assert stopping.status() == 0


@pytest.mark.slow
def test_a_whole_answer_that_takes_too_long_ends_with_503(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with program(scripted, monkeypatch, shutdown_timeout=1) as stopping, stopping.server.client() as client:
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json={"prompt": "STALL"}))
        )
        asking.start()
        eventually(lambda: len(scripted.history()) == 1)
        stopping.send(signal.SIGTERM)
        asking.join()
        (answer,) = answers
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_cancelled")
        assert stopping.status() == 0


@pytest.mark.slow
@both_signals
def test_a_load_in_progress_is_given_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    with program(scripted, monkeypatch, "slow") as stopping:
        eventually(lambda: any("Loading slow" in line for line in stopping.server.log))
        eventually(lambda: bool(children(stopping.server.process.pid)) or sys.platform != "linux")
        stopping.send(sent)
        assert stopping.status() == STATUS[sent]


def test_who_asked_for_a_load_is_told(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with program(scripted, monkeypatch) as stopping, stopping.server.client(stopping.server.admin_key) as admin:
        slow = scripted.add_model("slow")
        (slow / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        with admin.stream("POST", "/v1/model/load", json={"model_name": "slow"}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            stopping.send(signal.SIGTERM)
            *_, error, done = lines
            assert '"code":"request_cancelled"' in error
            assert done == "data: [DONE]"
        assert stopping.status() == 0


@pytest.mark.parametrize("second", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
@both_signals
def test_a_second_signal_ends_it_at_once(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, second: signal.Signals
) -> None:
    with program(scripted, monkeypatch) as stopping:
        with streaming(stopping.server, "BLOCK") as lines:
            stopping.send(sent)
            eventually(lambda: any("in flight" in line for line in stopping.server.log))
            stopping.send(second)
            with suppress(httpx.TransportError):  # the connection may be cut before the event
                assert all('"code":"request_cancelled"' in line or line == "data: [DONE]" for line in lines)
        assert stopping.status() == STATUS[sent]


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_template(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "{% if messages[-1].content == 'SLOW' %}" + "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2
    with program(scripted, monkeypatch, template=endless + "{% endif %}" + CHATML) as stopping:
        body = {"messages": [{"role": "user", "content": "SLOW"}]}
        with stopping.server.client() as client, ThreadPoolExecutor(1) as asking:
            asked = asking.submit(client.post, "/v1/chat/completions", json=body)
            stopping.send(signal.SIGTERM)
            eventually(lambda: any("in flight" in line for line in stopping.server.log))
            stopping.send(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                asked.result()
        assert stopping.status() == 0


@pytest.mark.slow
def test_the_real_engine(tiny_llama: Path, tmp_path: Path) -> None:
    with served(tmp_path, model=tiny_llama) as server, server.client() as client:
        stopping = Program(server)
        body = {"prompt": "Ada", "max_tokens": 100, "stream": True, "temperature": 0}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            stopping.send(signal.SIGTERM)
            assert list(lines)[-1] == "data: [DONE]"
        assert stopping.status() == 0
