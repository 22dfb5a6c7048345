"""vLLM's tests of tools and thoughts over HTTP, and of Anthropic's API.

They ask models of up to 24 billion parameters, each of which writes calls in its own way. Here a scripted engine writes
for each model what that one would, in pieces as long as tokens, and the server has to make the same of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from common.generation import TextDelta
from tests.endpoints.running import running_server
from tests.models import write_tokenizer
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.third_party.suites import AllowList, PackageCache, call, run_pytest
from tests.third_party.test_vllm import PYTEST_OPTIONS, STANDINS, unpack

ALLOWED = Path(__file__).with_name("vllm_tools.toml")
FILES = (
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "tool_use/mistral/test_mistral_tool_calls.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_parallel_tool_calls.py",
    "tool_use/test_tool_calls.py",
)
WEATHER = "get_current_weather"
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}
EMAIL = {"name": "John Smith", "email": "john@example.com", "plan_interest": "Enterprise", "demo_requested": True}
THOUGHT = "<think>\nThat is not hard.\n</think>\n\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def hermes(*calls: Mapping[str, str]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': WEATHER, 'arguments': arguments})}\n</tool_call>" for arguments in calls
    )


def llama3(*calls: Mapping[str, str]) -> str:
    return "; ".join(json.dumps({"name": WEATHER, "parameters": arguments}) for arguments in calls)


def mistral(*calls: Mapping[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{WEATHER}[ARGS]{json.dumps(arguments)}" for arguments in calls)


def mistral_old(*calls: Mapping[str, str]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": WEATHER, "arguments": arguments} for arguments in calls])


def granite(*calls: Mapping[str, str]) -> str:
    return "<|tool_call|>" + json.dumps([{"name": WEATHER, "arguments": arguments} for arguments in calls])


def granite_3_1(*calls: Mapping[str, str]) -> str:
    return "<tool_call>" + json.dumps([{"name": WEATHER, "arguments": arguments} for arguments in calls])


def internlm(*calls: Mapping[str, str]) -> str:
    return "".join(
        f"<|action_start|><|plugin|>\n{json.dumps({'name': WEATHER, 'parameters': arguments})}<|action_end|>"
        for arguments in calls
    )


def pythonic(*calls: Mapping[str, str]) -> str:
    return f"[{', '.join(f'{WEATHER}({_keywords(arguments)})' for arguments in calls)}]"


def _keywords(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())


# The suite's name of a model, `tool_format`, and how it writes calls.
MODELS = {
    "NousResearch/Hermes-3-Llama-3.1-8B": ("hermes", hermes),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama3_json", llama3),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama3_json", llama3),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral_old", mistral_old),
    "mistralai/Ministral-3-3B-Instruct-2512": ("mistral", mistral),
    "ibm-granite/granite-3.0-8b-instruct": ("granite", granite),
    "ibm-granite/granite-3.1-8b-instruct": ("hermes", granite_3_1),
    "internlm/internlm2_5-7b-chat": ("internlm2", internlm),
    "Team-ACE/ToolACE-8B": ("pythonic", pythonic),
    "Qwen/Qwen3-0.6B": ("hermes", hermes),
}


def test_tool_use(packages: PackageCache, tmp_path: Path) -> None:
    python, suite = unpack(packages, tmp_path / "suite")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    with scripted_servers(tmp_path / "servers") as servers:
        results = run_pytest(
            python,
            suite,
            *PYTEST_OPTIONS,
            *(f"tests/{file}" for file in FILES),
            report=tmp_path / "report.xml",
            timeout=600,
            variables={
                "PYTHONPATH": str(STANDINS),
                "SUITE_MODEL": str(tokenizer),
                "SUITE_SERVERS": json.dumps(servers),
            },
        )
    AllowList.read(ALLOWED).judge(results)


@contextmanager
def scripted_servers(folder: Path) -> Iterator[dict[str, str]]:
    """A server for each model; their addresses."""
    addresses = {}
    with ExitStack() as stack:
        for model, (tool_format, write) in MODELS.items():
            engine = ScriptedEngine(folder / model)
            engine.add_model("model")
            said = {
                "78 degrees": "It is 98 degrees in Dallas and 78 in Orlando.",
                "98 degrees": "It is 98 degrees in Dallas.",
                "Dallas, Texas and Orlando": write(DALLAS, ORLANDO),
                "Dallas, Texas": write(DALLAS),
                "joke": "Why did the fox cross the road? It was quick.",
                "4 or 12": "12",
                "how are you": "I am fine.",
                "New York": write({"location": "New York"}),
                "Extract the key information": json.dumps(EMAIL),
            }
            thoughtful = {
                "1+1": "2",
                "Berlin": write({"country": "Germany", "unit": "fahrenheit"}),
                "<|im_start|>tool": "It is late.",
                "What time": call("get_current_time"),
            }
            plays = [Play(when=when, deltas=tokens(text)) for when, text in said.items()]
            plays += [Play(when=when, chunks=[THOUGHT + text]) for when, text in thoughtful.items()]
            plays.append(Play(when="Cache coverage", then=[Play(cached_tokens=256)]))
            engine.write(Script(plays=plays, models={"model": ModelScript(max_seq_len=16384)}))
            server = stack.enter_context(running_server(engine, auth=False).running())
            server.load("model", tool_format=tool_format, reasoning_mode="on")
            addresses[model] = server.base_url
        yield addresses


def tokens(text: str) -> list[TextDelta]:
    """A text in pieces as a tokenizer cuts it: words with their blank, and marks."""
    return [TextDelta(piece, [number]) for number, piece in enumerate(re.findall(r" ?\w+|\s|[^\w\s]+", text))]
