"""Responses, whole and as streams, as OpenAI's client reads them."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from endpoints.Responses.router import LEFT_OUT_HEADER
from endpoints.Responses.utils.thoughts import unsealed
from tests.endpoints.Responses.asking import LS, ask, events, refused, streamed
from tests.endpoints.Responses.conftest import BROKEN, PATCH
from tests.endpoints.running import RunningServer

UNUSABLE = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no-such"}}}


def same(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what is another in every answer."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


# --- whole --------------------------------------------------------------------------------------------------------


def test_an_answer(server: RunningServer) -> None:
    with server.openai() as client:
        response = client.responses.create(
            model="gpt-4.1",
            input="COUNT",
            temperature=0.5,
            metadata={"topic": "numbers"},
            max_output_tokens=100,
            truncation="auto",
        )
    assert response.output_text == "one two three"
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert (response.model, response.temperature, response.max_output_tokens) == ("alpha", 0.5, 100)
    assert (response.metadata, response.truncation) == ({"topic": "numbers"}, "disabled")
    assert response.id.startswith("resp_")
    assert response.output[0].id is not None
    assert response.output[0].id.startswith("msg_")
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == len("one two three")
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.input_tokens_details.cache_write_tokens == usage.input_tokens - 4
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    request = server.engine.history()[-1]
    assert (request.sampling.temperature, request.max_tokens) == (0.5, 100)


def test_samplers_of_the_other_routes(server: RunningServer) -> None:
    ask(server, "COUNT", min_p=0.25, seed=7, stop="three")
    request = server.engine.history()[-1]
    assert (request.sampling.min_p, request.seed, request.stop_strings) == (0.25, 7, ["three"])


@pytest.mark.parametrize(
    ("fields", "content", "summary"),
    [({}, "plan", []), ({"reasoning": {"effort": "low", "summary": "auto"}}, None, ["plan"])],
)
def test_a_thought(server: RunningServer, fields: dict[str, Any], content: str | None, summary: list[str]) -> None:
    with server.openai() as client:
        response = client.responses.create(input="THINK", include=["reasoning.encrypted_content"], **fields)
    thought, message = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert (None if thought.content is None else thought.content[0].text) == content
    assert [part.text for part in thought.summary] == summary
    assert thought.encrypted_content is not None
    assert unsealed(thought.encrypted_content) == "plan"
    assert message.type == "message"
    assert response.output_text == "Hi you."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_no_more_tokens(server: RunningServer) -> None:
    with server.openai() as client:
        response = client.responses.create(input="COUNT", max_output_tokens=6)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [message] = response.output
    assert message.type == "message"
    assert message.status == "incomplete"
    assert response.output_text == "one tw"


def test_a_thought_without_an_end(server: RunningServer) -> None:
    [thought] = ask(server, "ONLY", max_output_tokens=10)["output"]
    assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")


def test_an_empty_answer_is_a_message(server: RunningServer) -> None:
    [message] = ask(server, "EMPTY")["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_a_call(server: RunningServer) -> None:
    with server.openai() as client:
        response = client.responses.create(input="LOOK", tools=[LS])  # type: ignore[list-item]  # a plain object
    thought, message, call = response.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments, call.status) == ("ls", '{"path": "/tmp"}', "completed")
    assert call.call_id.startswith("call_")
    assert response.tools[0].type == "function"


def test_calls_side_by_side(server: RunningServer) -> None:
    many = ask(server, "TWO CALLS", tools=[LS])["output"]
    assert [item["arguments"] for item in many] == ['{"path": "/tmp"}', '{"path": "/etc"}']
    assert len({item["call_id"] for item in many}) == 2


def test_the_choice_of_a_tool(server: RunningServer) -> None:
    response = ask(server, "LOOK", tools=[LS], tool_choice={"type": "function", "name": "ls"})
    assert response["tool_choice"] == {"type": "function", "name": "ls"}
    assert server.engine.history()[-1].constraints
    ask(server, "LOOK", tools=[LS], tool_choice="none")
    assert not server.engine.history()[-1].constraints


@pytest.mark.parametrize("stream", [False, True])
def test_what_openai_runs_is_left_out(server: RunningServer, stream: bool) -> None:
    search = {"type": "web_search", "external_web_access": True}
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    body = {"input": [searched, {"role": "user", "content": "LOOK"}], "tools": [search, LS], "stream": stream}
    response = server.http.post("/v1/responses", json=body)
    assert response.headers[LEFT_OUT_HEADER] == "web_search, web_search_call"
    whole = events(response)[-1]["response"] if stream else response.json()
    assert [tool["type"] for tool in whole["tools"]] == ["function"]
    assert whole["output"][-1]["name"] == "ls"


def test_a_tool_that_takes_a_text(server: RunningServer) -> None:
    tool = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    with server.openai() as client:
        response = client.responses.create(input="PATCH", tools=[tool])  # type: ignore[list-item]  # a plain object
    [call] = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", PATCH)


def test_a_tool_of_a_group(server: RunningServer) -> None:
    group = {"type": "namespace", "name": "team", "description": "x", "tools": [{"type": "function", "name": "close"}]}
    with server.openai() as client:
        response = client.responses.create(input="AGENT", tools=[group])  # type: ignore[list-item]  # a plain object
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.namespace, call.arguments) == ("close", "team", "{}")


def test_names_of_what_is_left_out_are_fit_for_a_header(server: RunningServer) -> None:
    kinds = ["web_search_2025", "é", "a\r\nb: c", "x" * 5000]
    body = {"input": "COUNT", "tools": [{"type": kind} for kind in kinds]}
    assert server.http.post("/v1/responses", json=body).headers[LEFT_OUT_HEADER] == "web_search_2025, ?"


class Found(BaseModel):
    animal: Literal["fox", "dog"]


def test_an_answer_in_a_shape(server: RunningServer) -> None:
    with server.openai() as client:
        response = client.responses.parse(model="alpha", input="JSON", text_format=Found)
    assert response.output_parsed == Found(animal="fox")
    [constraint] = server.engine.history()[-1].constraints
    assert json.loads(constraint.text)["properties"]["animal"]["enum"] == ["fox", "dog"]
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: RunningServer, stream: bool) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        found = streamed(server, "COUNT", **fields)
        told = [entry for event in found if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        response = found[-1]["response"]
    else:
        response = ask(server, "COUNT", **fields)
        told = response["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in told) == "one two three"
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in told)
    assert response["output"][0]["content"][0]["logprobs"] == told


# --- streamed -----------------------------------------------------------------------------------------------------

ITEM = ["response.output_item.added", "response.output_item.done"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("COUNT", {}),
        ("EMPTY", {}),
        ("THINK", {}),
        ("THINK", {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}),
        ("LOOK", {"tools": [LS]}),
        ("TWO CALLS", {"tools": [LS]}),
        ("PATCH", {"tools": [{"type": "custom", "name": "apply_patch"}]}),
        ("COUNT", {"max_output_tokens": 6}),
    ],
)
def test_a_stream_tells_what_the_whole_answer_holds(server: RunningServer, text: str, fields: dict[str, Any]) -> None:
    first, second, *middle, last = streamed(server, text, **fields)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == "in_progress"
    numbers = [event["sequence_number"] for event in (first, second, *middle, last)]
    assert numbers == list(range(len(numbers)))
    whole = ask(server, text, **fields)
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["status"] == whole["status"]
    assert list(map(same, response["output"])) == list(map(same, whole["output"]))
    assert {event["response"]["id"] for event in (first, second, last)} == {response["id"]}
    # Each item is added, told of and done before the next one is.
    for index, item in enumerate(response["output"]):
        own = [event for event in middle if event["output_index"] == index]
        assert own == middle[: len(own)]
        middle = middle[len(own) :]
        added, *between, done = own
        assert [added["type"], done["type"]] == ITEM
        assert added["item"]["id"] == done["item"]["id"] == item["id"]
        assert done["item"] == item
        assert all(event["item_id"] == item["id"] for event in between)
        assert "".join(event.get("delta", "") for event in between) == content_of(item)
    assert middle == []


def content_of(item: dict[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return str(item["input"])
        case _:
            [part] = item.get("content") or item["summary"]
            return str(part["text"])


@pytest.mark.parametrize(
    ("text", "fields", "between"),
    [
        ("COUNT", {}, ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]),
        ("THINK", {}, ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]),
        (
            "THINK",
            {"reasoning": {"summary": "detailed"}},
            [
                "reasoning_summary_part.added",
                "reasoning_summary_text.delta",
                "reasoning_summary_text.done",
                "reasoning_summary_part.done",
            ],
        ),
        ("TWO CALLS", {"tools": [LS]}, ["function_call_arguments.delta", "function_call_arguments.done"]),
        (
            "PATCH",
            {"tools": [{"type": "custom", "name": "apply_patch"}]},
            ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
        ),
    ],
)
def test_the_events_of_an_item(server: RunningServer, text: str, fields: dict[str, Any], between: list[str]) -> None:
    own = [event for event in streamed(server, text, **fields) if event.get("output_index") == 0]
    kinds = dict.fromkeys(event["type"].removeprefix("response.") for event in own)
    assert list(kinds) == ["output_item.added", *between, "output_item.done"]


def test_the_stream_helper_of_the_client(server: RunningServer) -> None:
    with (
        server.openai() as client,
        client.responses.stream(model="alpha", input="LOOK", tools=[LS]) as stream,  # type: ignore[list-item]  # a plain object
    ):
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_none_is_text(server: RunningServer, stream: bool) -> None:
    """An agent must not run what is no call, and must see what the model wrote."""
    if stream:
        found = streamed(server, "BROKEN", tools=[LS], max_output_tokens=len(BROKEN))
        done = [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"]
        assert "function_call" not in done
        response = found[-1]["response"]
    else:
        response = ask(server, "BROKEN", tools=[LS], max_output_tokens=len(BROKEN))
    assert {item["type"] for item in response["output"]} == {"message"}
    assert response["status"] == "incomplete"
    assert response["output"][-1]["content"][0]["text"] == BROKEN


def test_a_failure_within_a_stream(server: RunningServer) -> None:
    found = streamed(server, "FAIL")
    last = found[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert [event["type"] for event in found].count("response.failed") == 1
    with server.openai() as client, client.responses.create(input="FAIL", stream=True) as stream:
        assert [event.type for event in stream][-1] == "response.failed"


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"given": "x" * 5000}, "context_length_exceeded"), ({"given": "x", "text": UNUSABLE}, "invalid_prompt")],
)
def test_a_failure_before_there_is_a_response(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], code: str
) -> None:
    """Codex takes an `error` event for a broken connection, and tries the same five times more."""
    monkeypatch.setattr("endpoints.answering.ACCEPT_SECONDS", 0.0)
    [event] = streamed(server, **fields)
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["code"] == code
    assert event["response"]["status"] == "failed"


# --- refused ------------------------------------------------------------------------------------------------------

UNENFORCEABLE = {**LS, "strict": True, "parameters": {"properties": {"x": {"type": "string", "format": "no-such"}}}}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_request"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": 5}, "input", "invalid_request"),
        ({"input": [5]}, "input.0", "invalid_request"),
        ({"input": [{}]}, "input.0.content", "invalid_request"),
        ({"input": [{"type": "telegram"}]}, "input.0", "invalid_request"),
        ({"input": [{"role": "user"}]}, "input.0.content", "invalid_request"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input.0.call_id", "invalid_request"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input.0.content.0.file_id", "unsupported"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input.0.content.0", "unsupported"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}]},
         "input.0.output.0.text", "invalid_request"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "unsupported"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt", "unsupported"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported"),
        ({"input": "x", "tools": [LS], "tool_choice": {"type": "function", "name": "cd"}}, "tool_choice",
         "invalid_request"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice",
         "invalid_request"),
        ({"input": "x", "tools": [{"type": "web_search"}, LS, LS]}, "tools.2.name", "invalid_request"),
        ({"input": "x", "tools": [{"type": "web_search"}, UNENFORCEABLE]}, "tools.1.parameters", "unsupported"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "text"}}}},
         "text.format.schema", "invalid_request"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema",
         "invalid_request"),
        ({"input": "x", "tools": [5]}, "tools.0", "invalid_request"),
        ({"input": "x", "tools": [{"type": {}}]}, "tools.0.type", "invalid_request"),
        ({"input": "x", "tool_choice": {"type": []}}, "tool_choice.type", "invalid_request"),
        ({"input": [{"type": []}]}, "input.0", "invalid_request"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name", "invalid_request"),
        ({"input": "x", "tool_choice": "sometimes"}, "tool_choice", "invalid_request"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": "x" * 5000}, None, "context_length_exceeded"),
        (
            {"input": [{"role": "user", "content": "x" * 2500}] * 2, "truncation": "auto"},
            None,
            "context_length_exceeded",
        ),
        ({"input": "x", "background": True, "store": False}, "background", "invalid_request"),
        ({"input": "x", "background": True, "stream": True}, "stream", "unsupported"),
    ],
)  # fmt: skip
def test_what_cannot_be_served(server: RunningServer, body: dict[str, Any], param: str | None, code: str) -> None:
    error = refused(server, **body)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert "messages" not in error["message"]
    assert "response_format" not in error["message"]


def test_an_item_of_nobody(server: RunningServer) -> None:
    with server.openai() as client, pytest.raises(openai.NotFoundError, match="msg_1"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_1"}])


def test_there_is_no_compaction(server: RunningServer) -> None:
    response = server.http.post("/v1/responses/compact", json={"model": "alpha", "input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")


def test_an_explicit_null_is_no_field(server: RunningServer) -> None:
    nothing = ("instructions", "previous_response_id", "conversation", "tools", "tool_choice", "text", "reasoning",
               "include", "metadata", "max_output_tokens", "store", "stream", "truncation", "top_logprobs")  # fmt: skip
    assert ask(server, "COUNT", **dict.fromkeys(nothing))["status"] == "completed"


# --- counted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"input": "COUNT"}, {"input": "LOOK", "tools": [LS], "instructions": "Be brief."}])
def test_tokens_of_an_input(server: RunningServer, body: dict[str, Any]) -> None:
    usage = ask(server, body["input"], **{name: body[name] for name in body if name != "input"})["usage"]
    with server.openai() as client:
        assert client.responses.input_tokens.count(**body).input_tokens == usage["input_tokens"]
