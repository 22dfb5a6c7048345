"""A server with a model that thinks and calls, and Anthropic's client of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.messages import ControlToken
from tests.endpoints.running import API_KEY, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.serving import TRUSTED

if TYPE_CHECKING:
    from anthropic import Anthropic

TEMPLATES = Path(__file__).parents[2] / "common" / "chat_templates"


def called(path: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name":"ls","arguments":{{"path":"{path}"}}}}\n</tool_call>'


THOUGHT = "<think>\nWhere are they?\n</think>\n\n"
PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"], cached_tokens=4),
    Play(when="THINK", chunks=list(f"{THOUGHT}Here.")),
    Play(when="EMPTY", chunks=[]),
    Play(when="STOP", chunks=["one ", "two"], stop_sequence="###"),
    Play(when="/b</", chunks=[THOUGHT, "All seen. "]),
    Play(when="/a</", chunks=[THOUGHT, "And there? ", called("/b"), called("/c")]),
    Play(when="LOOK", chunks=list(THOUGHT + called("/a"))),
    Play(when="TWO", chunks=["Both. ", called("/a"), "\n", called("/b")]),
    Play(when="BREAK", chunks=list(f"Wait. {called('/long')}")),
    Play(when="HALF", chunks=[called("\\ud83d")]),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="BUSY", busy=1.2),
]
MAX_SEQ_LEN = 8192
TOKENS = [ControlToken(text, index, special=True) for index, text in enumerate(("<|im_start|>", "<|im_end|>"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    engine.write(Script(plays=PLAYS, models={"alpha": ModelScript(max_seq_len=MAX_SEQ_LEN, control_tokens=TOKENS)}))
    with running_server(engine).running() as running:
        shutil.copy(TEMPLATES / "qwen3.jinja", engine.model_dir / "alpha" / "chat_template.jinja")
        running.load("alpha")
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Anthropic]:
    """The official client, strict about what it reads."""
    from anthropic import Anthropic, DefaultHttpxClient  # takes seconds, which most tests need not spend

    with Anthropic(
        base_url=server.base_url,
        api_key=API_KEY,
        max_retries=0,
        timeout=60,
        http_client=DefaultHttpxClient(verify=TRUSTED),
        _strict_response_validation=True,
    ) as client:
        yield client
