"""What the codecs make of events that the scripted engine does not produce."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from common.caching import CacheExplanation, Difference
from common.generation import Event, Finish, GenerationRequest, Prefill, SampledLogprob, TextDelta, TokenLogprob, Usage
from common.templating import ChatTemplate
from endpoints.OAI.types.chat import ChatCompletionChunk, ChatCompletionRequest
from endpoints.OAI.types.common import Envelope
from endpoints.OAI.types.completion import Completion, CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec, ChatTurn
from endpoints.OAI.utils.completion import CompletionCodec, completion_generation_requests
from endpoints.OAI.utils.generation import total_usage
from endpoints.streaming import Queued
from tests.endpoints.OAI.writing import writer
from tests.endpoints.running import CHATML

ENVELOPE = Envelope(id="id", created=1, model="m", system_fingerprint="fp")
USAGE = Usage(
    prompt_tokens=10,
    completion_tokens=2,
    cached_tokens=4,
    matched_tokens=4,
    queue_seconds=0.125,
    prompt_seconds=0.5,
    completion_seconds=0.25,
)
TOP = [TokenLogprob(8, "e", b"e", -0.25), TokenLogprob(7, "é", "é".encode(), -0.5)]
EVENTS: list[Event | Queued] = [
    Queued(10),
    Prefill(done_tokens=5, total_tokens=10),
    TextDelta("é", [7], [SampledLogprob(7, "é", "é".encode(), -0.5, TOP)]),
    TextDelta("lan", [9], [SampledLogprob(9, "lan", b"lan", -1.0)]),
    Finish(reason="stop", eos_reason="stop_string", stop_sequence="###", usage=USAGE),
]


def chat_codec(**fields: object) -> ChatCodec:
    body = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}], **fields})
    return ChatCodec(ENVELOPE, ChatTurn(body, writer(CHATML)))


def completion_codec(**fields: object) -> CompletionCodec:
    return CompletionCodec(ENVELOPE, CompletionRequest.model_validate({"prompt": "hi", **fields}))


async def happening(events: list[Event | Queued]) -> AsyncIterator[tuple[int, Event | Queued]]:
    for event in events:
        yield 0, event


def chunks(codec: ChatCodec | CompletionCodec, events: list[Event | Queued] = EVENTS) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [json.loads(payload) async for payload in codec.stream(happening(events))]

    return asyncio.run(collect())


def whole(codec: ChatCodec | CompletionCodec, events: list[Event | Queued] = EVENTS) -> dict[str, Any]:
    return asyncio.run(codec.collect(happening(events))).model_dump()


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("route", ["chat", "completion"])
def test_every_event_of_a_stream_is_a_whole_chunk(route: str, options: dict[str, bool]) -> None:
    """Members and their order, although chunks are not made one by one."""
    fields = {"logprobs": 1 if route == "completion" else True, "stream_options": options, "return_progress": True}
    codec = chat_codec(**fields) if route == "chat" else completion_codec(**fields)
    made: type[BaseModel] = ChatCompletionChunk if route == "chat" else Completion

    async def payloads() -> list[str]:
        return [payload async for payload in codec.stream(happening(EVENTS))]

    for payload in asyncio.run(payloads()):
        assert made.model_validate_json(payload).model_dump_json() == payload


def test_chat_logprobs() -> None:
    choice = whole(chat_codec(logprobs=True, top_logprobs=2))["choices"][0]
    assert choice["stop_str"] == "###"
    first, second = choice["logprobs"]["content"]
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
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(chat_codec(logprobs=True, top_logprobs=2))]
    assert [piece and piece["content"] for piece in pieces] == [None, [first], [second], None]


def test_completion_logprobs() -> None:
    assert whole(completion_codec(logprobs=2))["choices"][0]["logprobs"] == {
        "tokens": ["é", "lan"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"é": -0.5, "e": -0.25}, {"lan": -1.0}],
        "text_offset": [0, 1],
    }


def test_usage_figures() -> None:
    usage = total_usage({0: USAGE}, 1)
    assert usage.prompt_tokens_per_sec == (10 - 4) / 0.5
    assert usage.completion_tokens_per_sec == 8
    assert (usage.queue_time, usage.prompt_time, usage.completion_time, usage.total_time) == (0.125, 0.5, 0.25, 0.75)


def test_several_prompts_are_summed_and_several_answers_counted() -> None:
    longer = Usage(prompt_tokens=100, completion_tokens=5, accepted_draft_tokens=3, rejected_draft_tokens=1)
    usage = total_usage({0: USAGE, 1: USAGE, 2: longer, 3: longer}, 2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (110, 14, 124)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.completion_tokens_details.accepted_prediction_tokens == 6
    assert usage.completion_tokens_details.rejected_prediction_tokens == 2


EXPLANATION = CacheExplanation(
    prompt_tokens=10,
    matched_tokens=4,
    resumed_tokens=4,
    processed_tokens=6,
    replayed_tokens=0,
    ram_tokens=0,
    disk_tokens=0,
    difference=Difference(position=4, cached="fox", requested="dog", before="the quick"),
    reason="So it is.",
)


def test_where_prompts_were_cached_is_summed_and_the_first_is_explained() -> None:
    first = msgspec.structs.replace(USAGE, explanation=EXPLANATION)
    other = Usage(
        prompt_tokens=1000,
        completion_tokens=1,
        cached_tokens=768,
        matched_tokens=900,
        ram_tokens=256,
        disk_tokens=512,
        explanation=msgspec.structs.replace(EXPLANATION, reason="Otherwise."),
    )
    details = total_usage({0: first, 1: first, 2: other, 3: other}, 2).prompt_tokens_details
    assert details.model_dump(exclude={"explanation"}) == {
        "cached_tokens": 772,
        "vram_tokens": 4,
        "ram_tokens": 256,
        "disk_tokens": 512,
        "matched_tokens": 904,
        "replayed_tokens": 132,
    }
    assert details.explanation is not None
    assert details.explanation.model_dump() == msgspec.to_builtins(EXPLANATION)
    assert "explanation" not in total_usage({0: USAGE}, 1).model_dump()["prompt_tokens_details"]


def test_usage_so_far_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = chunks(completion_codec(stream_options=options))
    assert [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events] == [
        (10, 1), (10, 2), (10, 2),
    ]  # fmt: skip
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 12
    alone = chunks(completion_codec(stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in event for event in alone)  # as at vLLM


@pytest.mark.parametrize(
    ("chat_fields", "completion_fields", "logprobs"),
    [
        ({}, {}, None),
        ({"logprobs": False}, {"logprobs": False}, None),
        ({"n_probs": 0}, {"n_probs": 0}, None),
        ({"logprobs": True}, {"logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}, 5),
        ({"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}, 3),
        ({"n_probs": 3}, {"n_probs": 3}, 3),
    ],
)
def test_how_many_logprobs(
    chat_fields: Mapping[str, object], completion_fields: Mapping[str, object], logprobs: int | None
) -> None:
    chat = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}], **chat_fields})
    completion = CompletionRequest.model_validate({"prompt": "hi", **completion_fields})
    requests = [
        *ChatTurn(chat, writer("x")).requests(),
        *completion_generation_requests(completion),
    ]
    assert [request.logprobs for request in requests] == [logprobs, logprobs]


def requests_for(template: ChatTemplate) -> list[GenerationRequest]:
    body = ChatCompletionRequest.model_validate({"messages": [{"content": "hi"}]})
    return ChatTurn(body, writer(template)).requests()


def test_a_bos_in_the_template_is_not_doubled() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    with_bos = ChatTemplate("t", source, {"bos_token": "<s>"})
    assert [(request.prompt, request.add_bos) for request in requests_for(with_bos)] == [("<s>hi", False)]
    assert [(request.prompt, request.add_bos) for request in requests_for(ChatTemplate("t", source))] == [("hi", None)]
