"""Chat templates of published models, from llama.cpp's collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import pytest

from common.config_models import ModelConfig
from common.errors import InvalidRequest
from common.parsing.detection import Certainty, detect
from common.templating import ChatTemplate
from endpoints.OAI.types.chat import ChatCompletionRequest
from tests.common.test_templating import CONVERSATIONS, REQUESTS, TOKENS, as_given, of_transformers
from tests.endpoints.OAI.test_boundaries import CHATS, expected_boundaries, prompt_of
from tests.endpoints.OAI.writing import writer
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
        prompts = writer(ChatTemplate(name, source, TOKENS))
        for kind, messages in LEGAL.items():
            body = ChatCompletionRequest.model_validate({"messages": messages, "tools": tools})
            try:
                text = prompts.chat(body).text
            except InvalidRequest:
                refused.append(name)
                continue
            words = [word for word in ("[1]", "[2]", "[3]", "[4]", "[call]") if word in str(messages)]
            assert [word for word in words if word not in text] == [], (name, kind)
    assert set(refused) <= ONLY_LLAMA_CPP


def test_where_prompts_change(templates: dict[str, str]) -> None:
    refused: set[str] = set()
    missing: list[tuple[str, str]] = []
    for name, source in templates.items():
        prompts = writer(ChatTemplate(name, source, TOKENS), has_checkpoints=True)
        for kind, fields in CHATS.items():
            try:
                found = prompt_of(prompts, **fields).boundaries
            except InvalidRequest:
                refused.add(name)
                continue
            expected = expected_boundaries(prompts, **fields)
            assert set(found) <= set(expected), (name, kind)
            if found != expected:
                missing.append((name, kind))
    assert missing == [
        ("google-gemma-2-2b-it", "nothing"),  # the system prompt becomes the beginning of an empty message
        ("mistralai-Mistral-Nemo-Instruct-2407", "continued"),  # shows no system prompt then: shorter than a page
    ]
    assert refused <= ONLY_LLAMA_CPP | {"CohereForAI-c4ai-command-r-plus-tool_use"}  # wants a description of parameters


# --- what is found out from them --------------------------------------------------------------------------------------

Found: TypeAlias = tuple[str | None, Certainty]
NOTHING: Found = (None, "unknown")
THINK = "<think> ... </think>"


def certain(value: str) -> Found:
    return (value, "certain")


def likely(value: str) -> Found:
    return (value, "likely")


# The form of calls and the tags of thoughts, by the template alone.
DETECTED: dict[str, tuple[Found, Found]] = {
    "Apertus-8B-Instruct": (certain("apertus"), likely("<|inner_prefix|> ... <|inner_suffix|>")),
    "Apriel-1.6-15b-Thinker-fixed": (
        certain("jamba"),
        certain("Here are my reasoning steps: ... [BEGIN FINAL RESPONSE]"),
    ),
    "Bielik-11B-v3.0-Instruct": (certain("hermes"), certain(THINK)),
    "ByteDance-Seed-OSS": (likely("qwen3_coder"), certain("<seed:think> ... </seed:think>")),
    "Cohere2MoE": (certain("command_r7b"), certain("<|START_THINKING|> ... <|END_THINKING|>")),
    "CohereForAI-c4ai-command-r-plus-tool_use": (certain("command_r"), NOTHING),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        certain("command_r7b"),
        certain("<|START_THINKING|> ... <|END_THINKING|>"),
    ),
    "GLM-4.6": (certain("glm4_5"), certain(THINK)),
    "GLM-4.7-Flash": (certain("glm4_5"), certain(THINK)),
    "GigaChat3-10B-A1.8B": (certain("gigachat3"), NOTHING),
    "GigaChat3.1-10B-A1.8B": (certain("gigachat3"), NOTHING),
    "HuggingFaceTB-SmolLM3-3B": (NOTHING, likely(THINK)),
    "Kimi-K2-Instruct": (likely("kimi"), NOTHING),
    "Kimi-K2-Thinking": (likely("kimi"), likely(THINK)),
    "Kimi-K3": (NOTHING, NOTHING),
    "LFM2-8B-A1B": (NOTHING, NOTHING),
    "LFM2.5-8B-A1B": (certain("lfm2"), certain(THINK)),
    "LFM2.5-Instruct": (NOTHING, likely(THINK)),
    "MiMo-VL": (certain("hermes"), NOTHING),
    "MiniMax-M1": (certain("minimax_m1"), NOTHING),
    "MiniMax-M2": (certain("minimax_m2"), certain(THINK)),
    "MiniMax-M3": (NOTHING, certain("<mm:think> ... </mm:think>")),
    "Mistral-Small-3.2-24B-Instruct-2506": (certain("mistral"), NOTHING),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (certain("qwen3_coder"), certain(THINK)),
    "NVIDIA-Nemotron-Nano-v2": (certain("nemotron"), certain(THINK)),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (certain("hermes"), NOTHING),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": (certain("hermes"), NOTHING),
    "Qwen-QwQ-32B": (certain("hermes"), certain(THINK)),
    "Qwen-Qwen2.5-7B-Instruct": (certain("hermes"), NOTHING),
    "Qwen-Qwen3-0.6B": (certain("hermes"), certain(THINK)),
    "Qwen3-Coder": (certain("qwen3_coder"), NOTHING),
    "Qwen3.5-4B": (certain("qwen3_coder"), certain(THINK)),
    "Reka-Edge": (certain("hermes"), certain(THINK)),
    "Spark2.5": (certain("glm4_5"), certain(THINK)),
    "StepFun3.5-Flash": (certain("qwen3_coder"), certain(THINK)),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (certain("deepseek_v3"), certain(THINK)),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (certain("deepseek_v3"), certain(THINK)),
    "deepseek-ai-DeepSeek-V3.1": (certain("deepseek_v3_1"), certain(THINK)),
    "deepseek-ai-DeepSeek-V3.2": (certain("deepseek_v4"), certain(THINK)),
    "deepseek-ai-DeepSeek-V4-Flash-0731": (certain("deepseek_v4"), certain(THINK)),
    "deepseek-ai-DeepSeek-V4": (certain("deepseek_v4"), certain(THINK)),
    "fireworks-ai-llama-3-firefunction-v2": (NOTHING, NOTHING),
    "google-gemma-2-2b-it": (NOTHING, NOTHING),
    "google-gemma-4-31B-it-interleaved": (certain("gemma4"), certain("<|channel>thought ... <channel|>")),
    "google-gemma-4-31B-it": (certain("gemma4"), certain("<|channel>thought ... <channel|>")),
    "ibm-granite-granite-3.3-2B-Instruct": (likely("granite"), likely(THINK)),
    "ibm-granite-granite-4.0": (certain("hermes"), NOTHING),
    "ibm-granite-granite-4.1": (certain("hermes"), NOTHING),
    "inclusionai-ling-3.0-flash": (certain("glm4_5"), certain(THINK)),
    "llama-cpp-deepseek-r1": (likely("deepseek_v3"), likely(THINK)),
    "llama-cpp-rwkv-world": (NOTHING, certain(THINK)),
    "meetkai-functionary-medium-v3.1": (certain("functionary"), NOTHING),
    "meetkai-functionary-medium-v3.2": (NOTHING, NOTHING),
    "meta-llama-Llama-3.1-8B-Instruct": (certain("llama3_json"), NOTHING),
    "meta-llama-Llama-3.2-3B-Instruct": (certain("llama3_json"), NOTHING),
    "meta-llama-Llama-3.3-70B-Instruct": (certain("llama3_json"), NOTHING),
    "microsoft-Phi-3.5-mini-instruct": (NOTHING, NOTHING),
    "mistralai-Ministral-3-14B-Reasoning-2512": (certain("mistral"), certain("[THINK] ... [/THINK]")),
    "mistralai-Mistral-Nemo-Instruct-2407": (certain("mistral_old"), NOTHING),
    "moonshotai-Kimi-K2": (certain("kimi"), NOTHING),
    "muse-glimmer": (certain("muse_glimmer"), certain("to=self<|message|> ... <|eom|>")),
    "openai-gpt-oss-120b": (certain("harmony"), certain("<|channel|>analysis<|message|> ... <|end|>")),
    "openbmb-MiniCPM5-1B": (NOTHING, certain(THINK)),
    "poolside-Laguna-S-2.1": (certain("glm4_5"), certain(THINK)),
    "poolside-Laguna-XS-2.1": (certain("glm4_5"), certain(THINK)),
    "poolside-Laguna-XS.2": (certain("glm4_5"), certain(THINK)),
    "tencent-Hy3": (certain("hy3"), certain("<think:opensource> ... </think:opensource>")),
    "unsloth-Apriel-1.5": (certain("jamba"), likely("<thinking> ... </thinking>")),
    "unsloth-mistral-Devstral-Small-2507": (certain("mistral"), NOTHING),
    "upstage-Solar-Open-100B": (certain("solar"), NOTHING),
}


def test_what_is_detected(templates: dict[str, str]) -> None:
    found = {name: detect(ChatTemplate(name, source, TOKENS), (), ModelConfig()) for name, source in templates.items()}
    assert {name: (syntax.tool_format[:2], syntax.thoughts[:2]) for name, syntax in found.items()} == DETECTED
