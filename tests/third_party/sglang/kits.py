"""SGLang's kits, each mixed into a test case as SGLang's own tests do it. Run in the suite's own environment."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from importlib import import_module

import openai
import pytest

KEY = "sk-test"
MODEL = "default"
REAL, SCRIPTED = os.environ["SUITE_REAL"], os.environ["SUITE_SCRIPTED"]
CASES = {
    name.removeprefix("_test_"): function
    for name, function in vars(import_module("sglang.test.tool_call_test_runner")).items()
    if name.startswith("_test_")
}


FORCED = ("required", "specific", "strict")  # whatever a model would say, there is a call


@pytest.mark.parametrize(
    ("server", "case"),
    [
        *(pytest.param(REAL, CASES[name], id=f"real-{name}") for name in FORCED),
        *(pytest.param(SCRIPTED, case, id=f"scripted-{name}") for name, case in CASES.items()),
    ],
)
def test_tool_call(server: str, case: Callable[[openai.Client, str], None]) -> None:
    with openai.Client(api_key=KEY, base_url=f"{server}/v1", max_retries=0) as client:
        case(client, MODEL)


class Host(unittest.TestCase):
    api_key = KEY
    model = MODEL
    base_url: str

    @property
    def client(self) -> openai.Client:
        return openai.Client(api_key=KEY, base_url=f"{self.base_url}/v1", max_retries=0)


def hosted(kit: str, mixin: str, server: str) -> type[unittest.TestCase]:
    return type(mixin, (getattr(import_module(f"sglang.test.kits.{kit}"), mixin), Host), {"base_url": server})


AnthropicMessages = hosted("anthropic_messages_kit", "AnthropicMessagesMixin", REAL)
JSONMode = hosted("json_mode_kit", "JSONModeMixin", REAL)
JSONConstrained = hosted("json_constrained_kit", "JSONConstrainedMixin", REAL)
ReasoningTokenUsage = hosted("reasoning_kit", "ReasoningTokenUsageMixin", SCRIPTED)
SeparateReasoning = hosted("reasoning_kit", "SeparateReasoningMixin", SCRIPTED)
