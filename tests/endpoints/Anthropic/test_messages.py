"""`/v1/messages` and `/v1/messages/count_tokens`, over the scripted engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from common.config_models import Settings
from endpoints.server import create_app, route_table
from tests.endpoints.Anthropic.conftest import MAX_SEQ_LEN, THOUGHT, called
from tests.endpoints.running import RunningServer
from tests.scripted import ScriptedEngine

if TYPE_CHECKING:
    from anthropic import Anthropic

LS = {"name": "ls", "description": "List a folder.", "input_schema": {"type": "object"}}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def body(content: object, **fields: Any) -> dict[str, Any]:
    return {"model": "alpha", "max_tokens": 1000, "messages": [{"role": "user", "content": content}], **fields}


def ask(server: RunningServer, content: object, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/messages", json=body(content, **fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


class Told(NamedTuple):
    """A server-sent event."""

    name: str
    data: dict[str, Any]


def events_of(response: httpx.Response) -> list[Told]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.replace("\r\n", "\n").strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(Told(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def streamed(server: RunningServer, content: object, **fields: Any) -> list[Told]:
    return events_of(server.http.post("/v1/messages", json=body(content, stream=True, **fields)))


def blocks_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    names = {"text": "text", "thinking": "thinking", "tool_use": "name"}
    return [(block["type"], block[names[block["type"]]]) for block in message["content"]]


def last_request(server: RunningServer) -> Any:
    return server.engine.history()[-1]


# --- whole and streamed -------------------------------------------------------------------------------------------


def test_a_message(client: Anthropic) -> None:
    message = client.messages.create(**body("COUNT"))
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "alpha")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    [block] = message.content
    assert block.type == "text"
    assert block.text == "one two three"
    assert message._request_id


def test_the_events_of_a_stream(server: RunningServer) -> None:
    events = streamed(server, "LOOK", thinking=THINKING, tools=[LS])
    assert all(event.name == event.data["type"] for event in events)
    names = [event.name for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks = [name.removeprefix("content_block_") for name in names[1:-2] if name != "ping"]
    assert blocks == ["start", *["delta"] * blocks[: blocks.index("stop")].count("delta"), "stop",
                      "start", *["delta"] * (len(blocks) - blocks.index("stop") - 3), "stop"]  # fmt: skip
    begun = events[0].data["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    thought, call = (event.data["content_block"] for event in events if event.name == "content_block_start")
    assert thought == {"type": "thinking", "thinking": "", "signature": ""}
    assert (call["name"], call["input"]) == ("ls", {})
    deltas = [event.data["delta"] for event in events if event.name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Where are they?"
    pieces = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"path": "/a"}
    assert len(pieces) > 1
    assert [delta["type"] for delta in deltas].count("signature_delta") == 1
    assert events[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    "fields",
    [
        body("COUNT"),
        body("EMPTY"),
        body("STOP", stop_sequences=["###"]),
        body("THINK", thinking=THINKING),
        body("THINK", thinking={"type": "adaptive", "display": "omitted"}),
        body("THINK"),
        body("LOOK", thinking=THINKING, tools=[LS]),
        body("TWO", tools=[LS]),
        body("COUNT", max_tokens=5),
        body("COUNT", max_tokens=0),
    ],
    ids=lambda fields: f"{fields['messages'][0]['content']}-{fields['max_tokens']}-{'thinking' in fields}",
)
def test_a_stream_says_what_the_whole_message_does(client: Anthropic, fields: dict[str, Any]) -> None:
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        told = stream.get_final_message()

    def comparable(message: Any) -> dict[str, Any]:
        values: dict[str, Any] = message.model_dump(exclude={"id"})
        for block in values["content"]:
            block.pop("parsed_output", None)
            for own in {"id", "signature"} & block.keys():
                assert block.pop(own)
        return values

    assert comparable(told) == comparable(whole)


def test_signs_of_life(server: RunningServer) -> None:
    events = streamed(server, "BUSY")
    assert Told("ping", {"type": "ping"}) in events
    assert events[-1].name == "message_stop"


# --- how an answer ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fields", "reason", "sequence"),
    [
        ("COUNT", {}, "end_turn", None),
        ("COUNT", {"max_tokens": 3}, "max_tokens", None),
        ("STOP", {"stop_sequences": ["x", "###"]}, "stop_sequence", "###"),
        ("STOP", {}, "end_turn", None),  # one of the template's
        ("LOOK", {"tools": [LS]}, "tool_use", None),
        ("LOOK", {}, "end_turn", None),
    ],
)
def test_stop_reasons(
    server: RunningServer, content: str, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    message = ask(server, content, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("max_tokens", [6000, None])
def test_an_answer_that_fills_the_context(server: RunningServer, max_tokens: int | None) -> None:
    usage = ask(server, "COUNT")["usage"]
    room = MAX_SEQ_LEN - usage["input_tokens"] - usage["cache_read_input_tokens"] - 1
    message = ask(server, "COUNT" + "x" * (room - 5), max_tokens=max_tokens)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert blocks_of(message) == [("text", "one t")]


def test_no_answer_at_all(server: RunningServer) -> None:
    message = ask(server, "COUNT", max_tokens=0)
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert last_request(server).max_tokens == 1


# --- thoughts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (THINKING, [("thinking", "Where are they?"), ("text", "Here.")]),
        ({"type": "adaptive"}, [("thinking", "Where are they?"), ("text", "Here.")]),
        ({"type": "adaptive", "display": "omitted"}, [("thinking", ""), ("text", "Here.")]),
        ({"type": "disabled"}, [("text", "Here.")]),
        (None, [("text", "Here.")]),
    ],
)
def test_thoughts_are_shown_to_those_who_ask(
    server: RunningServer, thinking: dict[str, Any] | None, shown: list[tuple[str, str]]
) -> None:
    message = ask(server, "THINK", thinking=thinking)
    assert blocks_of(message) == shown
    assert all(block["signature"] for block in message["content"] if block["type"] == "thinking")
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    asked_to_think = thinking is not None and thinking["type"] != "disabled"
    assert last_request(server).prompt.endswith("</think>\n\n") is not asked_to_think


def test_a_model_without_thoughts_may_be_asked_for_some(server: RunningServer) -> None:
    assert blocks_of(ask(server, "COUNT", thinking=THINKING)) == [("text", "one two three")]


def test_a_budget(server: RunningServer) -> None:
    message = ask(server, "THINK", thinking={"type": "enabled", "budget_tokens": 6})
    assert blocks_of(message) == [("thinking", "Wher"), ("text", "Here.")]


# --- tools --------------------------------------------------------------------------------------------------------


def test_calls(client: Anthropic) -> None:
    message = client.messages.create(**body("TWO", tools=[LS]))
    text, first, second = message.content
    assert text.type == "text"
    assert text.text == "Both."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input, second.input) == ("ls", {"path": "/a"}, {"path": "/b"})
    assert first.id.startswith("toolu_")
    assert first.id != second.id


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [(None, False), ({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "ls"}, True)],
)
def test_calls_that_have_to_be(server: RunningServer, choice: dict[str, Any] | None, constrained: bool) -> None:
    ask(server, "TWO", tools=[LS], tool_choice=choice)
    assert bool(last_request(server).constraints) is constrained


def test_calls_that_must_not_be(server: RunningServer) -> None:
    message = ask(server, "TWO", tools=[LS], tool_choice={"type": "none"})
    assert [kind for kind, _ in blocks_of(message)] == ["text"]
    assert message["stop_reason"] == "end_turn"


def test_a_call_that_is_broken_off_is_text(server: RunningServer) -> None:
    cut = len(f"Wait. {called('/long')}") - 20
    written = f"Wait. {called('/long')}"[:cut]
    message = ask(server, "BREAK", tools=[LS], max_tokens=cut)
    assert blocks_of(message) == [("text", written)]
    assert message["stop_reason"] == "max_tokens"
    deltas = [event.data["delta"] for event in streamed(server, "BREAK", tools=[LS], max_tokens=cut)
              if event.name == "content_block_delta"]  # fmt: skip
    assert "".join(delta.get("text", "") for delta in deltas) == written


def test_arguments_that_are_no_text(server: RunningServer) -> None:
    [block] = ask(server, "HALF", tools=[LS])["content"]
    assert block["input"] == {"path": "?"}


def test_an_answer_with_a_schema(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(server, "COUNT", output_config={"format": {"type": "json_schema", "schema": schema}})
    [constraint] = last_request(server).constraints
    assert json.loads(constraint.text) == schema


# --- conversations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_of_tools_goes_on_from_what_was_processed(
    client: Anthropic, server: RunningServer, log_lines: list[str], stream: bool, keeps_thoughts: bool
) -> None:
    fields = body("LOOK", tools=[LS], thinking=THINKING, system="Be kind.")
    prompts = []
    answers = [THOUGHT + called("/a"), f"{THOUGHT}And there? {called('/b')}{called('/c')}", f"{THOUGHT}All seen. "]
    for number in range(3):
        if stream:
            with client.messages.stream(**fields) as told:
                message = told.get_final_message()
        else:
            message = client.messages.create(**fields)
        prompts.append(last_request(server).prompt)
        content = [block.model_dump() for block in message.content if keeps_thoughts or block.type != "thinking"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"<path>{block.input['path']}</path>"}
            for block in message.content
            if block.type == "tool_use"
        ]
        assert bool(results) is (number < 2)
        fields["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    for before, answer, after in zip(prompts, answers, prompts[1:], strict=False):
        assert after.startswith(before + answer)
    assert not any("differs" in line for line in log_lines)


def test_an_answer_that_was_begun(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "COUNT"}, {"role": "assistant", "content": "zero "}]
    message = ask(server, "", messages=messages)
    assert blocks_of(message) == [("text", "one two three")]
    assert last_request(server).prompt.endswith("zero ")


def test_a_line_that_changes_with_every_request_is_left_out(server: RunningServer) -> None:
    """As Claude Code sends it, in a block of its own."""
    mark = {"cache_control": {"type": "ephemeral"}}
    seen = []
    for code in ("aa1", "bb2"):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=9.9.9; cch={code};"},
            {"type": "text", "text": "You are an agent. " * 20, **mark},
            {"type": "text", "text": "\nBe brief.", **mark},
        ]
        ask(server, [{"type": "text", "text": "COUNT", **mark}], system=system)
        request = last_request(server)
        seen.append((request.prompt, request.cache_boundaries))
        assert request.prompt[: request.cache_boundaries[0]].endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert seen[0] == seen[1]
    assert "billing" not in seen[0][0]
    only = [{"type": "text", "text": "x-anthropic-billing-header: cch=cc3;", **mark}]
    ask(server, "COUNT", system=only)
    assert last_request(server).prompt.startswith("<|im_start|>user")


# --- tokens -------------------------------------------------------------------------------------------------------


def test_tokens_of_a_prompt_are_counted_apart(server: RunningServer) -> None:
    usage = ask(server, "COUNT")["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (4, 0)
    assert usage["output_tokens"] == len("one two three")
    around = usage["input_tokens"] + 4 - len("COUNT")
    for more, whole_pages in ((512, 256), (513, 512)):
        usage = ask(server, "COUNT".ljust(more - around, "x"))["usage"]
        assert usage["cache_creation_input_tokens"] == whole_pages - 4
        assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": whole_pages - 4, "ephemeral_1h_input_tokens": 0}
        assert usage["input_tokens"] == more - whole_pages


@pytest.mark.parametrize(
    "fields", [{}, {"system": "Be kind.", "tools": [LS]}, {"thinking": THINKING}, {"tool_choice": {"type": "auto"}}]
)
def test_counted_tokens_are_those_of_the_prompt(client: Anthropic, server: RunningServer, fields: Any) -> None:
    usage = ask(server, "COUNT", **fields)["usage"]
    counted = client.messages.count_tokens(model="alpha", messages=body("COUNT")["messages"], **fields)
    figures = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted.input_tokens == sum(usage[figure] for figure in figures)


def test_a_conversation_that_ends_with_a_call_can_be_counted(server: RunningServer) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [use]}]
    response = server.http.post("/v1/messages/count_tokens", json={"messages": messages})
    assert response.status_code == 200
    assert response.json()["input_tokens"] > 0


# --- errors -------------------------------------------------------------------------------------------------------


def failure(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer.keys() == {"type", "error", "request_id"}
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert response.headers["request-id"] == answer["request_id"] != ""
    return str(answer["error"]["message"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/messages"])
def test_errors(server: RunningServer, path: str) -> None:
    assert failure(server.http.post(path, json={}), 400, "invalid_request_error") == "messages is missing."
    failure(server.http.post(path, content=b"{"), 400, "invalid_request_error")
    failure(server.anonymous.post(path, json=body("hi")), 401, "authentication_error")
    wrong = {"x-api-key": "wrong", "anthropic-version": "2023-06-01"}
    failure(server.anonymous.post(path, json=body("hi"), headers=wrong), 401, "authentication_error")
    image = {"type": "image", "source": {"type": "url", "url": "gopher://x"}}
    message = failure(server.http.post(path, json=body([image], system="s")), 400, "invalid_request_error")
    assert "messages.0.content.0 is an image" in message
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}
    tools = [LS, {"name": "x", "input_schema": schema, "strict": True}]
    message = failure(server.http.post(path, json=body("hi", tools=tools)), 400, "invalid_request_error")
    assert "tools.1.input_schema" in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(server: RunningServer, stream: bool) -> None:
    response = server.http.post("/v1/messages", json=body("x" * 9000, stream=stream))
    message = failure(response, 400, "invalid_request_error")
    tokens = int(message.removeprefix("prompt is too long: ").partition(" ")[0])
    assert message.startswith(
        f"prompt is too long: {tokens} tokens > {MAX_SEQ_LEN - 2} maximum. The prompt has {tokens} tokens"
    )


def test_a_failure(client: Anthropic, server: RunningServer) -> None:
    from anthropic import APIStatusError, InternalServerError

    failure(server.http.post("/v1/messages", json=body("FAIL")), 500, "api_error")
    with pytest.raises(InternalServerError):
        client.messages.create(**body("FAIL"))
    events = streamed(server, "FAIL")
    assert events[-1].name == events[-1].data["type"] == "error"
    assert events[-1].data["error"]["type"] == "api_error"
    assert "message_stop" not in [event.name for event in events]
    with pytest.raises(APIStatusError), client.messages.stream(**body("FAIL")) as stream:
        stream.get_final_message()


def test_models(client: Anthropic, server: RunningServer) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["alpha"]
    assert (models[0].type, models[0].display_name) == ("model", "alpha")
    assert client.models.retrieve("alpha") == models[0]
    assert server.http.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize(
    ("servers", "offered"),
    [(["oai"], {"messages", "chat"}), (["anthropic"], {"messages"}), (["kobold"], set())],
)
def test_where_the_routes_are(scripted: ScriptedEngine, servers: list[str], offered: set[str]) -> None:
    settings = Settings.model_validate({"network": {"api_servers": servers}})
    paths = {row.path for row in route_table(create_app(settings, scripted.manager(), None))}
    routes = {"messages": {"/v1/messages", "/v1/messages/count_tokens"}, "chat": {"/v1/chat/completions"}}
    assert {name for name in routes if routes[name] <= paths} == offered


def test_no_model(server: RunningServer) -> None:
    server.admin.post("/v1/model/unload").raise_for_status()
    try:
        failure(server.http.post("/v1/messages", json=body("hi")), 503, "overloaded_error")
    finally:
        server.load("alpha")
