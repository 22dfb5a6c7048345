"""Fields of requests: null, wrong, under other servers' names, and those that do nothing here."""

from __future__ import annotations

from typing import Any

import pytest
from loguru import logger
from pydantic import AliasChoices, ValidationError

from common.sampling import RequestModel
from endpoints.answering import IGNORED_HEADER
from endpoints.OAI.types.chat import ChatCompletionRequest, ReasoningOptions, ThinkingOptions
from endpoints.OAI.types.common import GenerationFields, ResponseFormat, StreamOptions, StructuredOutputs
from endpoints.OAI.types.completion import CompletionRequest
from endpoints.OAI.types.embedding import EmbeddingRequest, RerankRequest
from endpoints.OAI.types.message import ChatMessage, ContentPart, CustomCall, FunctionCall, ImageUrl, ToolCall
from endpoints.OAI.types.tools import (
    AllowedTools,
    FunctionSpec,
    NamedTool,
    ToolChoiceOfAllowed,
    ToolFunction,
    ToolSpec,
)
from tests.endpoints.OAI.test_chat import HI, chat, frames
from tests.endpoints.running import RunningServer

# The least that each of the objects of a request needs.
OBJECTS: dict[type[RequestModel], dict[str, Any]] = {
    AllowedTools: {"tools": []},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"prompt": "hi"},
    ChatMessage: {"content": "hi"},
    ContentPart: {"type": "text", "text": "hi"},
    CustomCall: {"name": "f"},
    EmbeddingRequest: {"input": "hi"},
    FunctionCall: {"name": "f"},
    FunctionSpec: {"name": "f"},
    ImageUrl: {"url": "data:,"},
    NamedTool: {"function": {"name": "f"}},
    ReasoningOptions: {},
    RerankRequest: {"query": "hi", "documents": ["hi"]},
    ResponseFormat: {},
    StreamOptions: {},
    StructuredOutputs: {},
    ThinkingOptions: {},
    ToolCall: {"function": {"name": "f"}},
    ToolChoiceOfAllowed: {"type": "allowed_tools", "allowed_tools": {"tools": []}},
    ToolFunction: {"name": "f"},
    ToolSpec: {"function": {"name": "f"}},
}


def names(model: type[RequestModel], field: str) -> list[str]:
    """What a request may call a field."""
    alias = model.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [field]


EVERY_NAME = [
    pytest.param(model, name, id=f"{model.__name__}-{name}")
    for model, least in OBJECTS.items()
    for field in model.model_fields
    for name in names(model, field)
    if name not in least
]


@pytest.mark.parametrize(("model", "name"), EVERY_NAME)
def test_null_is_the_same_as_absent(model: type[RequestModel], name: str) -> None:
    least = OBJECTS[model]
    with_null, without = model.model_validate({**least, name: None}), model.model_validate(least)
    assert with_null == without
    assert with_null.model_fields_set == without.model_fields_set


@pytest.mark.parametrize("model", list(OBJECTS))
def test_null_is_no_value_for_what_is_needed(model: type[RequestModel]) -> None:
    for name in OBJECTS[model]:
        if model.model_fields[name].is_required():
            with pytest.raises(ValidationError, match="Field required"):
                model.model_validate({**OBJECTS[model], name: None})


def test_all_objects_of_a_request_are_here() -> None:
    def below(model: type[RequestModel]) -> set[type[RequestModel]]:
        return {model}.union(*map(below, model.__subclasses__()))

    ours = {
        model
        for model in below(RequestModel)
        if model.__module__.startswith("endpoints.OAI.types") and not model.__name__.startswith("_")
    }
    assert ours - {GenerationFields} == set(OBJECTS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": "x"}, 'max_new_tokens should be a valid integer, not "x".'),
        ({"n": 1.5}, "n should be a valid integer, not 1.5."),
        ({"response_format": "json"}, 'response_format should be an object, not "json".'),
        (
            {"stream_options": {"include_usage": "x"}},
            'stream_options.include_usage should be a valid boolean, not "x".',
        ),
        ({"logprobs": "x"}, 'logprobs should be a valid integer, not "x".'),
        ({"logprobs": 21}, "logprobs should be less than or equal to 20, not 21."),
        ({"tool_choice": "x"}, "tool_choice should be 'none', 'auto' or 'required', not \"x\"."),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing."),
        ({"tool_choice": {"function": {}}}, "tool_choice.function.name is missing."),
        ({"tools": [5]}, "tools.0 should be an object, not 5."),
        ({"messages": None}, "messages is missing."),
        ({"messages": "x"}, 'messages should be a list, not "x".'),
        ({"guided_choice": "abc"}, 'guided_choice should be a list, not "abc".'),
        ({"stop": [None]}, "stop must be a string, or a list of strings and token ids, not [null]."),
    ],
)
def test_one_problem_is_told_once_and_in_few_words(
    server: RunningServer, fields: dict[str, object], message: str
) -> None:
    response = server.http.post("/v1/chat/completions", json=HI | fields)
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, message)
    assert message.startswith(f"{error['param']} ")


def test_what_changes_nothing_is_accepted(server: RunningServer) -> None:
    chat(server, HI)
    plain = server.engine.history()[-1]
    response = server.http.post(
        "/v1/chat/completions",
        json=HI
        | {
            "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": False,
            "prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "safety_identifier": "s",
            "prompt_cache_key": "k", "skip_special_tokens": True, "spaces_between_special_tokens": True,
            "cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "min_keep": 0, "n_keep": 0, "priority": 0,
            "unheard_of": {"a": 1},
        },
    )  # fmt: skip
    assert response.status_code == 200
    assert IGNORED_HEADER not in response.headers
    assert server.engine.history()[-1] == plain


def test_names_of_other_servers(server: RunningServer) -> None:
    fields = {
        "n_predict": 7, "repeat_penalty": 1.5, "repeat_last_n": 64, "stop_token_ids": [5], "bad_words": ["no"],
        "allowed_token_ids": [1, 2], "ignore_eos": True, "min_p": 0.25, "logit_bias": [[5, False]],
    }  # fmt: skip
    chat(server, HI | fields)
    asked = server.engine.history()[-1]
    sampling = asked.sampling
    assert (asked.max_tokens, asked.stop_tokens, asked.banned_strings) == (7, [5], ["no"])
    assert (sampling.repetition_penalty, sampling.penalty_range, sampling.min_p) == (1.5, 64, 0.25)
    assert (sampling.allowed_tokens, sampling.ban_eos_token, sampling.logit_bias) == ([1, 2], True, {5: -1000.0})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_samplers_that_do_nothing_are_named_once(server: RunningServer, path: str, stream: bool) -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    body = {"prompt": "COUNT", **HI, "stream": stream, "n": 2, "mirostat": 2, "tfs_z": 0.5, "top_a": 0}
    try:
        response = server.http.post(f"/v1/{path}", json=body)
    finally:
        logger.remove(sink)
    assert response.headers[IGNORED_HEADER] == "tfs, mirostat_mode"
    assert len([line for line in lines if "mirostat_mode" in line]) == 1
    if stream:
        assert frames(response)


@pytest.mark.parametrize("echo", [True, False])
def test_a_message_that_is_gone_on_from_comes_back_on_request(server: RunningServer, echo: bool) -> None:
    messages = [{"role": "user", "content": "COUNT"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": echo}
    text = "Well, one two three" if echo else "one two three"
    assert chat(server, body)["choices"][0]["message"]["content"] == text
    events = frames(server.http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_half_a_surrogate_pair_is_replaced(server: RunningServer) -> None:
    raw = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}], "stream": %s}'
    for stream in (b"true", b"false"):
        headers = {"Content-Type": "application/json"}
        response = server.http.post("/v1/chat/completions", content=raw % stream, headers=headers)
        assert response.status_code == 200
        assert "cut ?" in str(server.engine.history()[-1].prompt)
