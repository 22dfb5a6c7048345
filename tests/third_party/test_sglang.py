"""SGLang's kits about tools, thoughts, JSON, and Anthropic's API.

Calls that a request forces come from the demo model. What a larger model decides on itself, and thoughts, which the
demo model has not, are played by a scripted engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script
from tests.serving import served
from tests.third_party.suites import AllowList, PackageCache, call, run_pytest, set_defaults

PACKAGE = "sglang==0.5.23"
ALLOWED = Path(__file__).with_name("sglang.toml")
SUITE = Path(__file__).parent / "sglang"
TEMPLATE = Path(__file__).parents[1] / "common" / "chat_templates" / "qwen3.jinja"
REQUIREMENTS = ("anthropic>=2.14,<3", "openai>=3.57,<4", "pytest>=9.2,<10", "pytest-timeout>=2.4,<3", "requests")
MEMBERS = ("sglang/test/kits/", "sglang/test/tool_call_test_runner.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# What a model says to the prompts of the kits; the first that fits counts.
PLAYS = {
    "<tool_response>\n8\n": "It is 8.",
    "call both functions": call("add", a=3, b=5) + "\n" + call("get_weather", city="Tokyo"),
    "weather in Tokyo?": call("add", a=3, b=5) + "\n" + call("get_weather", city="Tokyo"),
    "capital of France": call("get_weather", city="Paris"),
    "5 + 7": call("add", a=5, b=7),
    "5 - 7": call("add", a=5, b=-7),
    "3 + 5": call("add", a=3, b=5),
    "1+1": "It is 2.",
    "1+3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>": "It is 4.",
    "1+3": "<think>\nOne and three.\n</think>\n\nIt is 4.",
}


def test_kits(packages: PackageCache, smollm2: Path, tmp_path: Path) -> None:
    python = packages.environment("sglang", *REQUIREMENTS)
    suite = Path(shutil.copytree(SUITE, tmp_path / "suite"))
    shutil.copytree(packages.wheel(PACKAGE, python, MEMBERS), suite, dirs_exist_ok=True)
    with served(tmp_path, "--disable-auth", "true", model=smollm2) as real, scripted(tmp_path / "scripted") as script:
        set_defaults(real, max_tokens=64, seed=42)
        results = run_pytest(
            python,
            suite,
            "kits.py",
            *("-p", "sglang_standins", "--timeout", "120"),
            report=tmp_path / "report.xml",
            timeout=600,
            variables={
                "PYTHONPATH": str(suite),
                "SUITE_REAL": real.base_url,
                "SUITE_SCRIPTED": script.base_url,
            },
        )
    AllowList.read(ALLOWED).judge(results)


@contextmanager
def scripted(folder: Path) -> Iterator[RunningServer]:
    """A server whose model knows tools and thinks, as its template says; nothing is set."""
    engine = ScriptedEngine(folder)
    engine.add_model("model")
    engine.write(Script(plays=[Play(when=when, chunks=[text]) for when, text in PLAYS.items()]))
    with running_server(engine, auth=False).running() as server:
        shutil.copy(TEMPLATE, engine.model_dir / "model" / "chat_template.jinja")
        server.load("model")
        yield server
