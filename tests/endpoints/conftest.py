"""Servers for the tests of the HTTP side."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.generation import SampledLogprob, TextDelta, TokenLogprob
from tests.endpoints.running import RunningServer, running_server
from tests.samples import TEMPLATES
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script
from tests.serving import ServerProcess

PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"], cached_tokens=4),
    Play(when="HANG", chunks=["never"], hang_after=0),
    Play(when="STALL", chunks=["a ", "b "], hang_after=2),
    Play(when="BUSY", busy=2.5),
    Play(when="PREFILL", prefill=[(index, 100) for index in range(100)], delay=0.1),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="RANK", chunks=["poor"], logprob=-3.0, then=[
        Play(chunks=["good"], logprob=-1.0), Play(chunks=["fair"], logprob=-2.0), Play(chunks=["best"], logprob=-0.25),
    ]),
    Play(when="HELD", deltas=[
        TextDelta("a", [1], [SampledLogprob(1, "a", b"a", -0.5)]),
        TextDelta("", [2], [SampledLogprob(2, "\ufffd", b"\xc3", -1.0, [TokenLogprob(9, "\ufffd", b"\xc4", -1.5)])]),
        TextDelta("é!", [3, 4], [SampledLogprob(3, "\ufffd", b"\xa9", -2.0), SampledLogprob(4, "!", b"!", -0.125)]),
    ]),
    Play(when="EMPTY", chunks=[]),
    Play(when="STOP", chunks=["one ", "two"], stop_sequence="###"),
    Play(when="NAME IT", chunks=['{ "title": ', '"A walk" }']),
    Play(when="TAG IT", chunks=['```json\n{ "tags": ["walk"] }', "\n```"]),
    Play(when="GO ON", chunks=['{ "follow_ups": ["Where?"] }']),
    Play(when="PROGRESS", prefill=[(256, 600), (600, 600)], cached_tokens=128, draft_tokens=(7, 2)),
]  # fmt: skip


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
def thinking_server(real_server: ServerProcess, tiny_hybrid: Path) -> Iterator[ServerProcess]:
    """The real engine's server, whose model has a template for a while that knows thoughts and calls."""
    name = "qwen3_5"
    more = tiny_hybrid / "additional_chat_templates"
    more.mkdir(exist_ok=True)
    shutil.copy(TEMPLATES / f"{name}.jinja", more)
    with real_server.client(real_server.admin_key) as admin:
        assert admin.post("/v1/template/switch", json={"prompt_template_name": name}).status_code == 200
        yield real_server
        own = {"prompt_template_name": "chat_template"}
        assert admin.post("/v1/template/switch", json=own).status_code == 200


@pytest.fixture
def empty_server(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server of its own, without a model."""
    scripted.write(Script(plays=PLAYS))
    with running_server(scripted).running() as running:
        yield running
