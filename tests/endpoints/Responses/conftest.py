"""A server whose model thinks and calls tools, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.samples import TEMPLATES
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/tmp"}}\n</tool_call>'
BROKEN = CALL.partition("/tmp")[0]
PATCH = '*** Begin Patch\n+ "é" \\ 😀\n*** End Patch'
PATCHED = (
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": '
    '"*** Begin Patch\\n+ \\"\\u00e9\\" \\\\ \\ud83d\\ude00\\n*** End Patch"}}\n</tool_call>'
)
# The first that is part of a prompt is played, so those of later turns come first.
PLAYS = [
    Play(when="FINALLY", chunks=["<think>\nDone.\n</think>\n\n", "All seen."], cached_tokens=40),
    Play(when="LOOK", chunks=["<think>\nWh", "ere?\n</th", "ink>\n\nI look", ".\n", *CALL]),
    Play(when="TWO CALLS", chunks=[CALL, "\n" + CALL.replace("/tmp", "/etc")]),
    Play(when="BROKEN", chunks=list(BROKEN)),
    Play(when="PATCH", chunks=list(PATCHED)),
    Play(when="AGENT", chunks=['<tool_call>\n{"name": "team__close", "arguments": {}}\n</tool_call>']),
    Play(when="THINK", chunks=["<think>\npl", "an\n</think>\n\n", "Hi ", "you."]),
    Play(when="ONLY", chunks=["<think>\nplan"]),
    Play(when="COUNT", chunks=["one ", "two ", "three"], cached_tokens=4),
    Play(when="JSON", chunks=['{"animal": ', '"fox"}']),
    Play(when="EMPTY", chunks=[]),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="SLOWLY", chunks=["a ", "b "], hang_after=2),
]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("responses"))
    template = engine.add_model("alpha") / "tabby_template.jinja"
    template.write_text((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"), encoding="utf-8")
    engine.write(Script(plays=PLAYS))
    with running_server(engine).running() as running:
        running.load("alpha")
        yield running
