"""vLLM's tests of the Responses API over HTTP.

They ask models that think and call tools. A scripted engine writes what one of them would.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.endpoints.running import running_server
from tests.models import write_tokenizer
from tests.samples import TEMPLATES
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.third_party.suites import AllowList, PackageCache, call, run_pytest
from tests.third_party.test_vllm import PYTEST_OPTIONS, STANDINS, unpack

ALLOWED = Path(__file__).with_name("vllm_responses.toml")
# Their other files test vLLM's classes without a server, or the tools that it runs itself.
FILES = (
    "test_basic.py",
    "test_function_call.py",
    "test_namespace_tool_separator.py",
    "test_simple.py",
    "test_stateful.py",
    "test_structured_output.py",
)
EVENT = {"event_name": "Science Fair", "date": "Friday", "participants": ["Alice", "Bob"]}
BERLIN = {"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}
# The first that is part of the prompt is said, so those of later turns come first.
SAID = {
    "at (48.8": "It is 20 degrees.",
    "get_weather for Berlin and get_time": call("get_weather", location="Berlin")
    + "\n"
    + call("get_time", location="Tokyo"),
    "Call the get_weather function for Berlin": call("get_weather", location="Berlin"),
    "like in Paris today": call("get_weather", latitude=48.8, longitude=2.3),
    "weather is in Berlin and the": call("get_current_weather", **BERLIN),
    "weather is in Berlin?": call("get_current_weather", **BERLIN),
    "app state tool": call("mcp__computer_use__get_app_state", app="Google Chrome"),
    "Alice and Bob": json.dumps(EVENT),
    "What is my real name": "Mark",
    "What is my name": "John",
    "Multiply the result": "30. QED.",
    "QED": "That is 312. QED.",
    "13 * 24": "That is 312.",
}
THOUGHT = "<think>\nThat is not hard.\n</think>\n\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_responses(packages: PackageCache, tmp_path: Path) -> None:
    python, suite = unpack(packages, tmp_path / "suite")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    engine = ScriptedEngine(tmp_path / "server")
    template = engine.add_model("model") / "tabby_template.jinja"
    template.write_text((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"), encoding="utf-8")
    plays = [Play(when="long story", chunks=["Once ", "upon "], hang_after=2)]
    plays += [Play(when=when, chunks=[*THOUGHT, *text]) for when, text in SAID.items()]
    plays.append(Play(chunks=[THOUGHT, "Hello ", "you, and the whole world, ", "too."]))
    engine.write(Script(plays=plays, models={"model": ModelScript(max_seq_len=18192)}))
    with running_server(engine, auth=False).running() as server:
        server.load("model")
        results = run_pytest(
            python,
            suite,
            *PYTEST_OPTIONS,
            *(f"tests/entrypoints/openai/responses/{file}" for file in FILES),
            report=tmp_path / "report.xml",
            timeout=600,
            variables={
                "PYTHONPATH": str(STANDINS),
                "SUITE_MODEL": str(tokenizer),
                "SUITE_SERVERS": json.dumps({"*": server.base_url}),
            },
        )
    AllowList.read(ALLOWED).judge(results)
