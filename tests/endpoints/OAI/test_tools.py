"""Tools in requests, and calls in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from backends.messages import ControlToken
from common.generation import GenerationRequest
from endpoints.OAI.types.chat import ChatCompletionRequest
from tests.endpoints.OAI.test_chat import chat, streamed
from tests.endpoints.OAI.writing import writer
from tests.endpoints.running import RunningServer, running_server
from tests.samples import TEMPLATES
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


QWEN3 = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
CALL = call_of("ls", '{"path":"/srv/é"}')
LOOP = [
    "<think>\nWhere?\n</think>\n\n" + call_of("ls", '{"path":"/a"}') + "\n",
    "<think>\nAnd there?\n</think>\n\nNext.\n" + call_of("ls", '{ "path": "/b" }'),
    "<think>\nEnough.\n</think>\n\n All seen. \n",
]
PLAYS = [
    Play(when="LOOP", chunks=[LOOP[0]], then=[Play(chunks=list(LOOP[1])), Play(chunks=[LOOP[2]])]),
    Play(when="ONE CALL", chunks=[CALL]),
    Play(when="TEXT AND CALLS", chunks=["<think>\nWhere?\n</think>\n\n", "Let me see.\n", *CALL, call_of("rm", "{}")]),
    Play(when="BROKEN", chunks=["So: ", call_of("ls", '{"path": "/a", oops'), "\n", call_of("rm", "{}")]),
    Play(when="UNDECLARED", chunks=[call_of("format_disk", "{}")]),
    Play(when="CUT", chunks=["ok <tool_call>\n", '{"name": "ls", "arguments": {"path": "/a', '"}}'], finish="length"),
]  # fmt: skip
LS: dict[str, Any] = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
RM: dict[str, Any] = {"type": "function", "function": {"name": "rm"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("plain")
    (engine.add_model("qwen") / "tabby_template.jinja").write_text(QWEN3, encoding="utf-8")
    tokens = [ControlToken(text, 1_100_000 + len(text), special=True) for text in ("<|im_start|>", "<|im_end|>")]
    engine.write(Script(plays=PLAYS, models={"qwen": ModelScript(control_tokens=tokens)}))
    with running_server(engine).running() as running:
        running.load("qwen")
        yield running


def body(text: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": [LS, RM], **fields}


def last(server: RunningServer) -> GenerationRequest:
    return server.engine.history()[-1]


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_whole_answer_with_a_call(server: RunningServer) -> None:
    [choice] = chat(server, body("ONE CALL"))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "ls", "arguments": '{"path":"/srv/é"}'},
    }
    assert call["id"]


def test_the_deltas_of_a_call(server: RunningServer) -> None:
    deltas = [event["choices"][0]["delta"] for event in streamed(server, body("TEXT AND CALLS"))]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Where?"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    first, *pieces = [call for call in calls if call["index"] == 0]
    second = next(call for call in calls if call["index"] == 1)
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "ls", "arguments": ""},
    }
    assert all(piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"path":"/srv/é"}'
    assert len(pieces) > 5
    assert second["function"]["name"] == "rm"
    assert second["id"] not in ("", first["id"])


def test_the_openai_client_takes_both(server: RunningServer) -> None:
    arguments: dict[str, Any] = {
        "model": "x",
        "messages": [{"role": "user", "content": "TEXT AND CALLS"}],
        "tools": [LS, RM],
    }
    with server.openai() as client:
        whole = client.chat.completions.create(**arguments).choices[0]
        with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
            streamed = stream.get_final_completion()
    together = streamed.choices[0]
    for choice in (whole, together):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == [
            ("ls", '{"path":"/srv/é"}'), ("rm", "{}"),
        ]  # fmt: skip
    assert streamed.usage is not None


def test_the_arguments_of_a_broken_call_are_no_json(server: RunningServer) -> None:
    [choice] = chat(server, body("BROKEN"))["choices"]
    assert choice["message"]["content"].startswith('So: <tool_call>\n{"name": "ls", "arguments": {"path": "/a", oops}')
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["rm"]
    arguments: dict[int, str] = {}
    content = ""
    for event in streamed(server, body("BROKEN")):
        delta = event["choices"][0]["delta"]
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    assert content == choice["message"]["content"]
    assert arguments[1] == "{}"
    with pytest.raises(ValueError, match="Expecting|Unterminated"):
        json.loads(arguments[0])


@pytest.mark.parametrize(
    ("text", "fields", "content", "reason"),
    [
        ("UNDECLARED", {}, call_of("format_disk", "{}"), "stop"),
        ("ONE CALL", {"tools": None}, CALL, "stop"),
        ("ONE CALL", {"tools": []}, CALL, "stop"),
        ("ONE CALL", {"tool_choice": "none"}, CALL, "stop"),
        ("ONE CALL", {"tools": [RM]}, CALL, "stop"),
        ("CUT", {"max_tokens": 40}, 'ok <tool_call>\n{"name": "ls", "arguments', "length"),
    ],
)
def test_what_is_no_call_is_content(
    server: RunningServer, text: str, fields: dict[str, Any], content: str, reason: str
) -> None:
    [choice] = chat(server, body(text) | fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert choice["finish_reason"] == reason


def test_each_of_several_answers_has_calls_of_its_own(server: RunningServer) -> None:
    choices = chat(server, body("ONE CALL", n=3))["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 3


def test_logprobs_are_those_of_the_content(server: RunningServer) -> None:
    [choice] = chat(server, body("TEXT AND CALLS", logprobs=True))["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Let me see."


def test_functions_of_old_get_tool_calls(server: RunningServer) -> None:
    asked = {"messages": [{"role": "user", "content": "ONE CALL"}], "functions": [LS["function"]]}
    assert chat(server, asked)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "ls"
    assert chat(server, asked | {"function_call": "none"})["choices"][0]["message"]["content"] == CALL


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "only functions can be called"),
        ({"tools": [LS, {"type": "web_search", "name": "s"}]}, "tools.1.type", "only functions can be called"),
        ({"tools": [LS, LS]}, "tools.1.function.name", "'ls' is the name of another tool"),
        ({"tools": [LS, {}]}, "tools.1.function", "is missing"),
        ({"tools": [{"function": {}}]}, "tools.0.function.name", "is missing"),
        ({"tools": [{"function": {"name": ""}}]}, "tools.0.function.name", "at least 1 character"),
        ({"tools": [{"function": {"name": "x" * 300}}]}, "tools.0.function.name", "at most 256 characters"),
        ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools.0.function.parameters", "an object"),
        ({"tools": None, "functions": [{"name": "f"}, {"name": "f"}]}, "functions.1.name", "another tool"),
        ({"tools": None, "functions": [{}]}, "functions.0.name", "is missing"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "cp"}}}, "tool_choice", "'cp', which is none"),
        ({"tools": None, "tool_choice": {"name": "cp"}}, "tool_choice", "'cp', which is none"),
        ({"function_call": {"name": "cp"}}, "function_call", "'cp', which is none"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
            "tool_choice",
            "there are no tools",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        ({"tool_choice": 5}, "tool_choice", "should be 'none', 'auto' or 'required'"),
    ],
)
def test_what_is_wrong_with_tools_is_named(
    server: RunningServer, fields: dict[str, Any], param: str, message: str
) -> None:
    response = server.http.post("/v1/chat/completions", json=body("x") | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_tools_are_shown_as_they_were_described(server: RunningServer) -> None:
    tool = {"z": 1, "function": {"strict": False, "x-vendor": None, "name": "f"}, "type": "function"}
    bare = {"name": "g", "parameters": None, "description": "é"}
    chat(server, body("x", tools=[tool, bare]))
    shown = {"type": "function", "function": {"name": "g", "description": "é"}}
    for described in (tool, shown):
        assert json.dumps(described, ensure_ascii=False) in str(last(server).prompt)


@pytest.mark.parametrize("excluded", [False, True])
def test_tools_that_may_not_be_called_stay_in_the_prompt_unless_a_setting_says_otherwise(excluded: bool) -> None:
    prompts = writer(QWEN3, exclude_tools_when_tool_choice_none=excluded)

    def shows_tools(**fields: object) -> bool:
        return "<tools>" in prompts.chat(ChatCompletionRequest.model_validate(body("x", **fields))).text

    assert shows_tools()
    assert shows_tools(tool_choice="none") is not excluded


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "rm"}]}}


def test_tools_that_are_not_allowed_are_shown_and_not_called(server: RunningServer) -> None:
    assert chat(server, body("ONE CALL", tool_choice=ALLOWED))["choices"][0]["message"]["content"] == CALL
    assert '"name": "ls"' in str(last(server).prompt)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"tool_choice": "auto"}, []),
        ({"tool_choice": "none", "parallel_tool_calls": False}, []),
        ({"tool_choice": "required"}, ["ls", "rm"]),
        ({"tool_choice": "any"}, ["ls", "rm"]),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, ["rm"]),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "ls"}]}}, ["ls"]),
        ({"function_call": {"name": "rm"}}, ["rm"]),
        ({"parallel_tool_calls": False}, ["ls", "rm"]),
        ({"response_format": {"type": "json_object"}}, ["ls", "rm"]),
    ],
)
def test_what_is_enforced_of_calls(server: RunningServer, fields: dict[str, Any], names: list[str]) -> None:
    chat(server, body("x") | fields)
    grammar = "".join(constraint.frame or constraint.text for constraint in last(server).constraints)
    assert [name for name in ("ls", "rm") if f'\\"{name}\\"' in grammar or f'"{name}"' in grammar] == names


def test_a_strict_tool_is_enforced_where_it_may_be_called(server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"path": {"enum": ["/xyz"]}}}
    tool = {"type": "function", "function": {"name": "ls", "strict": True, "parameters": parameters}}
    chat(server, body("x", tools=[tool]))
    assert any("/xyz" in (constraint.frame or constraint.text) for constraint in last(server).constraints)


def test_a_strict_schema_that_cannot_be_enforced_is_a_400(server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "format": "no-such-format"}}}
    tool = {"type": "function", "function": {"name": "ls", "strict": True, "parameters": parameters}}
    response = server.http.post("/v1/chat/completions", json=body("x", tools=[RM, tool]))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools.1.function.parameters"


# --- history --------------------------------------------------------------------------------------------------------


def ran(arguments: object, **call: object) -> dict[str, Any]:
    made = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": arguments}} | call
    return {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        ],
        "tools": [LS],
    }


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"path": "/s', '{"path": "/s'),
        ('""', '""'),
        ({"path": "/srv/é", "n": 1.0}, '{"path": "/srv/é", "n": 1.0}'),
        ('{"path":"/srv/é","n":1.0}', '{"path": "/srv/é", "n": 1.0}'),
        (None, "{}"),
        ("", "{}"),
    ],
)
def test_no_call_of_the_past_ends_a_chat(server: RunningServer, arguments: object, shown: str) -> None:
    chat(server, ran(arguments))
    prompt = str(last(server).prompt)
    assert f'<tool_call>\n{{"name": "ls", "arguments": {shown}}}\n</tool_call>' in prompt
    assert "<tool_response>\nab\n</tool_response>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls_goes_on_from_what_was_processed(
    server: RunningServer, log_lines: list[str], stream: bool
) -> None:
    """Although the client forgets thoughts and nulls, and writes arguments in its own way."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "LOOP"}]
    with server.openai() as client:
        for _ in LOOP:
            arguments: dict[str, Any] = {"model": "x", "messages": messages, "tools": [LS]}
            if stream:
                with client.chat.completions.stream(**arguments) as chunks:
                    message = chunks.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**arguments).choices[0].message
            calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []]
            for call in calls:
                path = json.loads(call["function"]["arguments"])["path"]
                call["function"] = {"name": "ls", "arguments": f'{{"path" : "{path}"}}'}
            answer: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
            messages.append(answer | {"content": message.content} if message.content else answer)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "x y"} for call in calls]
    first, second, third = (str(request.prompt) for request in server.engine.history()[-3:])
    assert second.startswith(first + LOOP[0])
    assert third.startswith(second + LOOP[1])
    assert messages[-1]["content"] == " All seen. \n"
    assert not any("differs from the prompt" in line for line in log_lines)


def test_a_model_of_which_nothing_is_known(server: RunningServer) -> None:
    server.load("plain")
    try:
        assert server.http.get("/v1/model").json()["parameters"]["warnings"] == []
        assert chat(server, body("ONE CALL"))["choices"][0]["finish_reason"] == "tool_calls"
        [warning] = server.http.get("/v1/model").json()["parameters"]["warnings"]
        assert "tool_format" in warning
    finally:
        server.load("qwen")
