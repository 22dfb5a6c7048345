"""What the codecs make of events that the scripted engine does not produce."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.config_models import ModelConfig
from common.generation import Event, Finish, GenerationRequest, Prefill, SampledLogprob, TextDelta, TokenLogprob, Usage
from common.templating import ChatTemplate
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.common import Envelope
from endpoints.OAI.types.completion import CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec, chat_generation_requests
from endpoints.OAI.utils.completion import CompletionCodec, completion_generation_requests
from endpoints.OAI.utils.generation import total_usage
from endpoints.OAI.utils.prompt import PromptWriter

ENVELOPE = Envelope(id="id", created=1, model="m", system_fingerprint="fp")
E_ACUTE = "é".encode()
TOP = [TokenLogprob(8, "e", b"e", -0.25), TokenLogprob(7, "é", E_ACUTE, -0.5)]
EVENTS: list[Event] = [
    Prefill(done_tokens=5, total_tokens=10),
    TextDelta(
        "é",
        [7],
        [
            SampledLogprob(
                7, "é", E_ACUTE, -0.5, [TokenLogprob(8, "e", b"e", -0.25), TokenLogprob(7, "é", E_ACUTE, -0.5)]
            )
        ],
    ),
    TextDelta("lan", [9], [SampledLogprob(9, "lan", b"lan", -1.0)]),
    Finish(
        reason="stop",
        eos_reason="stop_string",
        stop_sequence="###",
        usage=Usage(
            prompt_tokens=10, completion_tokens=2, cached_tokens=4, prompt_seconds=0.5, completion_seconds=0.25
        ),
    ),
]
VARIABLES = ChatTemplate("variables", "{{ a }}{{ b }}{{ c }}{{ enable_thinking }}{{ reasoning_effort }}")


async def happening(events: list[Event] = EVENTS) -> AsyncIterator[tuple[int, Event]]:
    for event in events:
        yield 0, event


def chunks(codec: ChatCodec | CompletionCodec) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [json.loads(payload) async for payload in codec.stream(happening())]

    return asyncio.run(collect())


def test_chat_logprobs() -> None:
    codec = ChatCodec(ENVELOPE, 1, include_usage=False)
    whole = asyncio.run(codec.collect(happening())).model_dump()["choices"][0]
    assert whole["stop_str"] == "###"
    first, second = whole["logprobs"]["content"]
    assert first == {
        "token": "é",
        "token_id": 7,
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "e", "token_id": 8, "logprob": -0.25, "bytes": [101]},
            {"token": "é", "token_id": 7, "logprob": -0.5, "bytes": [195, 169]},
        ],
    }
    assert second["top_logprobs"] == []
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(codec)]
    assert [piece and piece["content"] for piece in pieces] == [None, [first], [second], None]


def test_completion_logprobs_have_offsets_into_the_whole_answer() -> None:
    codec = CompletionCodec(ENVELOPE, 1, 1, include_usage=False)
    whole = asyncio.run(codec.collect(happening())).model_dump()["choices"][0]
    assert whole["logprobs"] == {
        "tokens": ["é", "lan"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"é": -0.5, "e": -0.25}, {"lan": -1.0}],
        "text_offset": [0, 1],
    }
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(codec)]
    assert [piece and piece["text_offset"] for piece in pieces] == [[0], [1], None]


def test_rates_count_what_was_processed() -> None:
    finish = EVENTS[-1]
    assert isinstance(finish, Finish)
    usage = total_usage({0: finish}, 1)
    assert usage.prompt_tokens_per_sec == (10 - 4) / 0.5
    assert usage.completion_tokens_per_sec == 8
    assert usage.total_time == 0.75


@pytest.mark.parametrize(
    ("chat_fields", "completion_fields", "logprobs"),
    [
        ({}, {}, None),
        ({"logprobs": False}, {"logprobs": False}, None),
        ({"logprobs": True}, {"logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}, 5),
        ({"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_how_many_logprobs(
    chat_fields: dict[str, object], completion_fields: dict[str, object], logprobs: int | None
) -> None:
    chat = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}], **chat_fields})
    completion = CompletionRequest.model_validate({"prompt": "hi", **completion_fields})
    requests = [
        *chat_generation_requests(chat, PromptWriter(ChatTemplate("t", "x"), ModelConfig())),
        *completion_generation_requests(completion),
    ]
    assert [request.logprobs for request in requests] == [logprobs, logprobs]


def requests_for(template: ChatTemplate) -> list[GenerationRequest]:
    body = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}]})
    return chat_generation_requests(body, PromptWriter(template, ModelConfig()))


def test_a_bos_in_the_template_is_not_doubled() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    with_bos = ChatTemplate("t", source, {"bos_token": "<s>"})
    assert [(request.prompt, request.add_bos) for request in requests_for(with_bos)] == [("<s>hi", False)]
    assert [(request.prompt, request.add_bos) for request in requests_for(ChatTemplate("t", source))] == [("hi", None)]


def test_precedence_of_template_variables() -> None:
    model = ModelConfig(template_vars_default={"a": "default ", "b": "default "}, template_vars_force={"c": "forced "})
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [{"content": "hi"}],
            "chat_template_kwargs": {"b": "request ", "c": "request "},
            "reasoning": {"enabled": False, "effort": "low"},
            "enable_thinking": True,
        }
    )
    assert PromptWriter(VARIABLES, model).chat(body).text == "default request forced Truelow"


def test_messages_as_templates_see_them() -> None:
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [
                {"role": "developer", "content": [{"text": "be "}, {"text": "kind"}]},
                {"role": "assistant", "tool_calls": [
                    {"id": "c1", "function": {"name": "f", "arguments": '{"path":"/srv/é","n":1.0}'}}
                ]},
            ],
        }
    )  # fmt: skip
    template = ChatTemplate("t", "{{ messages | tojson }}")
    assert json.loads(PromptWriter(template, ModelConfig()).conversation(body.messages, {}).text) == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"path": "/srv/é", "n": 1.0}}}
        ]},
    ]  # fmt: skip
    knows = ChatTemplate("t", "{# developer #}{{ messages[0].role }}")
    assert PromptWriter(knows, ModelConfig()).conversation(body.messages, {}).text == "developer"


@pytest.mark.parametrize("arguments", ['{"a":' * 100_000, '{"path": "/s', "[1]", ""])
def test_a_call_that_a_model_once_botched_does_not_end_the_chat(arguments: str) -> None:
    call = {"id": "c1", "function": {"name": "ls", "arguments": arguments}}
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    template = ChatTemplate("t", "{{ messages[0].tool_calls[0].function.arguments is mapping }}")
    assert PromptWriter(template, ModelConfig()).chat(body).text == "True"


def test_tools_reach_the_template_as_they_came() -> None:
    tool = {"function": {"strict": True, "name": "f", "x-vendor": None}, "type": "function"}
    body = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}], "tools": [tool]})
    assert PromptWriter(ChatTemplate("t", "{{ tools | tojson }}"), ModelConfig()).chat(body).text == json.dumps([tool])
