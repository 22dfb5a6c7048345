"""Chat templates of published models, from llama.cpp's collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config_models import ModelConfig
from common.errors import InvalidRequest
from common.templating import ChatTemplate
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.prompt import PromptWriter
from tests.common.test_templating import CONVERSATIONS, REQUESTS, TOKENS, as_given, of_transformers
from tests.third_party.suites import PackageCache
from tests.third_party.test_llama_cpp import PACKAGE

TEMPLATES = Path("vendor", "llama.cpp", "models", "templates")
# They read a variable, or pass tojson a value, that only llama.cpp has.
ONLY_LLAMA_CPP = {"fireworks-ai-llama-3-firefunction-v2", "llama-cpp-deepseek-r1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def templates(packages: PackageCache) -> dict[str, str]:
    folder = packages.sdist(PACKAGE, packages.environment("scikit-build", "scikit-build-core")) / TEMPLATES
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    assert len(found) > 50
    return found


def test_all_are_rendered_as_transformers_does(templates: dict[str, str]) -> None:
    rendered = 0
    for name, source in templates.items():
        template = ChatTemplate(name, source, TOKENS)
        for conversation, messages in CONVERSATIONS.items():
            for tools, begin, variables in REQUESTS:
                expected = of_transformers(source, messages, tools=tools, add_generation_prompt=begin, **variables)
                text = as_given(template, messages, tools, {"add_generation_prompt": begin, **variables})
                assert text == expected, (name, conversation, tools, begin, variables)
                rendered += text is not None
    assert rendered > 40 * len(templates)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CALL = {"id": "call_0123456789", "function": {"name": "ls", "arguments": '{"path": "/srv/[call]"}'}}
USED = [{"role": "assistant", "tool_calls": [CALL]}, said("tool", "[result]") | {"tool_call_id": CALL["id"]}]
LEGAL = {
    "system in the middle": [said("user", "[1]"), said("system", "[2]"), said("user", "[3]")],
    "several systems": [said("system", "[1]"), said("system", "[2]"), said("user", "[3]"), said("developer", "[4]")],
    "no turns": [said("user", "[1]"), said("user", "[2]"), said("assistant", "[3]"), said("assistant", "[4]")],
    "a greeting": [said("system", "[1]"), said("assistant", "[2]"), said("user", "[3]")],
    "tools": [said("user", "[1]"), *USED, said("assistant", "[2]"), said("user", "[3]")],
}


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "ls"}}]])
def test_no_legal_conversation_is_refused_or_cut(templates: dict[str, str], tools: list[dict[str, Any]] | None) -> None:
    refused: list[str] = []
    for name, source in templates.items():
        writer = PromptWriter(ChatTemplate(name, source, TOKENS), ModelConfig())
        for kind, messages in LEGAL.items():
            body = ChatCompletionRequest.model_validate({"messages": messages, "tools": tools})
            try:
                text = writer.chat(body).text
            except InvalidRequest:
                refused.append(name)
                continue
            words = [word for word in ("[1]", "[2]", "[3]", "[4]", "[call]") if word in str(messages)]
            assert [word for word in words if word not in text] == [], (name, kind)
    assert set(refused) <= ONLY_LLAMA_CPP
