"""Servers for the tests of the HTTP side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"], cached_tokens=4),
    Play(when="HANG", chunks=["never"], hang_after=0),
    Play(when="STALL", chunks=["a ", "b "], hang_after=2),
    Play(when="BUSY", busy=2.5),
    Play(when="PREFILL", prefill=[(index, 100) for index in range(100)], delay=0.1),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for a module, with the model "alpha" loaded and "beta" beside it."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    engine.add_model("beta")
    engine.write(Script(plays=PLAYS))
    with running_server(engine).running() as running:
        running.load("alpha")
        yield running


@pytest.fixture
def empty_server(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server of its own, without a model."""
    scripted.write(Script(plays=PLAYS))
    with running_server(scripted).running() as running:
        yield running
