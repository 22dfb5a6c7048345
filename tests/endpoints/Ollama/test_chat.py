"""Ollama's routes that generate, on the scripted engine, with Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from backends.messages import ControlToken
from common.generation import GenerationRequest
from common.sampling import SamplingParameters
from endpoints.answering import IGNORED_HEADER
from tests.endpoints.Ollama.clients import ollama_client
from tests.endpoints.running import ADMIN_KEY, RunningServer, eventually, running_server
from tests.pictures import BLUE, RED, picture
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script

COUNTED = "one two three"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"]),
    Play(when="WEATHER", chunks=["Let me see.", CALL, CALL.replace("Paris", "Rome")]),
    Play(when="HALF", chunks=[CALL.replace("Paris", "\\ud83d")]),
    Play(when="BROKEN", chunks=['<tool_call>\n{"name": "get_wea']),
    Play(when="THINK", chunks=["<think>hm, ", "so</think>", "Yes."]),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="JSON", chunks=['{"city": ', '"Paris"}']),
]
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The model "alpha", which is loaded, thinks, sees, calls tools and fills in the middle; "beta" lies beside it."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("ollama"))
    engine.add_model("alpha")
    engine.add_model("beta")
    tokens = [ControlToken(text, index, True) for index, text in enumerate(FIM)]
    engine.write(Script(plays=PLAYS, models={"alpha": ModelScript(control_tokens=tokens, tower=True)}))
    with running_server(engine).running() as running:
        running.load("alpha", reasoning_mode="on", tool_format="hermes", vision=True)
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama_client(server.base_url) as client:
        yield client


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def last_request(server: RunningServer) -> GenerationRequest:
    return server.engine.history()[-1]


# --- chats --------------------------------------------------------------------------------------------------------


def test_a_whole_answer(client: ollama.Client) -> None:
    answer = client.chat("alpha", said("COUNT"))
    assert (answer.model, answer.done, answer.done_reason) == ("alpha", True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", COUNTED)
    assert (answer.prompt_eval_count, answer.eval_count) == (len("<|im_start|>user\nCOUNT<|im_end|>\n") + 22, 13)
    durations = (answer.total_duration, answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(isinstance(duration, int) for duration in durations)
    assert 0 <= (answer.load_duration or 0) < (answer.total_duration or 0)
    assert answer.created_at is not None
    assert answer.created_at.endswith("Z")


def test_a_stream(client: ollama.Client) -> None:
    *pieces, last = client.chat("alpha", said("COUNT"), stream=True)
    assert [piece.message.content for piece in pieces] == ["one ", "two ", "three"]
    assert not any(piece.done or piece.done_reason or piece.eval_count for piece in pieces)
    assert (last.message.content, last.done, last.done_reason, last.eval_count) == ("", True, "stop", 13)


def test_streams_are_the_default(server: RunningServer) -> None:
    response = server.http.post("/api/chat", json={"model": "alpha", "messages": said("COUNT")})
    assert response.headers["content-type"].partition(";")[0] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["message"] for line in lines[:1]] == [{"role": "assistant", "content": "one "}]
    assert [line["done"] for line in lines] == [False, False, False, True]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("alpha", "alpha"),
        ("alpha:latest", "alpha:latest"),
        ("llama3.2", "alpha:latest"),
        ("\ud800", "alpha:latest"),
    ],
)
def test_the_model_is_called_as_asked_where_it_is_that(server: RunningServer, asked: str, told: str) -> None:
    for messages in (said("COUNT"), []):
        body = json.dumps({"model": asked, "messages": messages, "stream": False})
        assert server.http.post("/api/chat", content=body).json()["model"] == told


def test_length(client: ollama.Client) -> None:
    answer = client.chat("alpha", said("COUNT"), options={"num_predict": 4})
    assert (answer.message.content, answer.done_reason) == ("one ", "length")


def test_thoughts(client: ollama.Client) -> None:
    message = client.chat("alpha", said("THINK"), think=True).message
    assert (message.thinking, message.content) == ("hm, so", "Yes.")
    *pieces, _ = client.chat("alpha", said("THINK"), stream=True)
    assert [(piece.message.thinking, piece.message.content) for piece in pieces] == [
        ("hm,", ""),
        (" so", ""),
        (None, "Yes."),
    ]


def test_calls(client: ollama.Client) -> None:
    message = client.chat("alpha", said("WEATHER"), tools=[WEATHER_TOOL]).message
    assert message.content == "Let me see."
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    *pieces, last = client.chat("alpha", said("WEATHER"), tools=[WEATHER_TOOL], stream=True)
    streamed = [call.function.arguments for piece in pieces for call in piece.message.tool_calls or ()]
    assert streamed == [{"city": "Paris"}, {"city": "Rome"}]
    assert last.done_reason == "stop"


def test_calls_are_numbered_and_have_ids(server: RunningServer) -> None:
    body = {"model": "alpha", "messages": said("WEATHER"), "tools": [WEATHER_TOOL], "stream": False}
    calls = server.http.post("/api/chat", json=body).json()["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_call(server: RunningServer, stream: bool) -> None:
    """JSON can express it, UTF-8 cannot."""
    body = {"model": "alpha", "messages": said("HALF"), "tools": [WEATHER_TOOL], "stream": stream}
    [called, *_] = map(json.loads, server.http.post("/api/chat", json=body).text.splitlines())
    assert called["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "?"}


def test_a_broken_call_is_text(client: ollama.Client) -> None:
    message = client.chat("alpha", said("BROKEN"), tools=[WEATHER_TOOL]).message
    assert message.tool_calls is None
    assert message.content == '<tool_call>\n{"name": "get_wea'


def test_a_conversation_with_calls(client: ollama.Client, server: RunningServer) -> None:
    """Results name the tool, and arguments are objects."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        *said("Weather?"),
        {"role": "assistant", "content": "", "thinking": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
        *said("COUNT"),
    ]
    assert client.chat("alpha", messages, tools=[WEATHER_TOOL]).message.content == COUNTED
    prompt = last_request(server).prompt
    assert isinstance(prompt, str)
    places = [prompt.index(text) for text in ("Be brief.", "Weather?", '"city": "Paris"', "sunny", "COUNT")]
    assert places == sorted(places)


def test_images_come_before_their_text(client: ollama.Client, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "COUNT", "images": [picture(RED), picture(BLUE)]}]
    assert client.chat("alpha", messages).message.content == COUNTED
    request = last_request(server)
    assert [image.data for image in request.images] == [picture(RED), picture(BLUE)]
    [(_, red_end)], [(blue_start, blue_end)] = (image.spans for image in request.images)
    assert red_end == blue_start
    assert str(request.prompt)[blue_end:].startswith("COUNT")
    client.generate("alpha", "COUNT", images=[picture(RED)])
    assert [image.data for image in last_request(server).images] == [picture(RED)]


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"city": {"type": "string"}}}])
def test_formats(client: ollama.Client, server: RunningServer, format: Any) -> None:
    assert client.chat("alpha", said("JSON"), format=format).message.content == '{"city": "Paris"}'
    [constraint] = last_request(server).constraints
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.text)["type"] == "object"


def test_log_probabilities(client: ollama.Client) -> None:
    answer = client.chat("alpha", said("COUNT"), logprobs=True, top_logprobs=2, options={"num_predict": 1})
    [entry] = answer.logprobs or ()
    assert (entry.token, entry.logprob) == ("o", -0.5)
    assert [other.token for other in entry.top_logprobs or ()] == ["o", "p"]
    first, _ = client.chat("alpha", said("COUNT"), logprobs=True, options={"num_predict": 1}, stream=True)
    assert [entry.token for entry in first.logprobs or ()] == ["o"]


def test_options(client: ollama.Client, server: RunningServer) -> None:
    options = {
        "num_predict": 40,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["###"],
        "repeat_penalty": 1.1,
        "repeat_last_n": 64,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    client.chat("alpha", said("COUNT"), options=options)
    request = last_request(server)
    assert (request.max_tokens, request.seed, request.stop_strings[0]) == (40, 5, "###")
    assert request.sampling == SamplingParameters(
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.1,
        penalty_range=64,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_no_limit(client: ollama.Client, server: RunningServer, limit: int) -> None:
    assert client.chat("alpha", said("COUNT"), options={"num_predict": limit}).message.content == COUNTED
    assert last_request(server).max_tokens == 0


def test_what_has_no_effect_is_told(server: RunningServer) -> None:
    options = {"num_ctx": 8192, "num_thread": 4, "mirostat": 1, "tfs_z": 0.9}
    body = {"model": "alpha", "messages": said("COUNT"), "options": options, "keep_alive": "5m"}
    response = server.http.post("/api/chat", json=body)
    # Who may not load models has no say in how long they stay.
    assert set(response.headers[IGNORED_HEADER].split(", ")) == {"num_ctx", "mirostat_mode", "tfs", "keep_alive"}
    assert server.admin.post("/api/chat", json=body | {"options": {}}).headers.get(IGNORED_HEADER) is None


# --- prompts ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_users_message(client: ollama.Client, server: RunningServer) -> None:
    answer = client.generate("alpha", "THINK", system="Be brief.")
    assert (answer.response, answer.thinking, answer.done_reason) == ("Yes.", "hm, so", "stop")
    prompt = last_request(server).prompt
    assert isinstance(prompt, str)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTHINK")
    *pieces, last = client.generate("alpha", "COUNT", stream=True)
    assert [piece.response for piece in pieces] == ["one ", "two ", "three"]
    assert (last.response, last.done, last.eval_count) == ("", True, 13)


def test_a_raw_prompt(client: ollama.Client, server: RunningServer) -> None:
    answer = client.generate("alpha", "THINK", raw=True, system="no", format="json", options={"num_predict": 4})
    assert (answer.response, answer.thinking, answer.done_reason) == ("<thi", None, "length")
    request = last_request(server)
    assert request.prompt == "THINK"
    assert len(request.constraints) == 1


def test_fill_in_the_middle(client: ollama.Client, server: RunningServer) -> None:
    assert client.generate("alpha", "COUNT(", suffix=")", system="no").response == COUNTED
    assert last_request(server).prompt == "<|fim_prefix|>COUNT(<|fim_suffix|>)<|fim_middle|>"


def test_a_model_without_a_template(client: ollama.Client, server: RunningServer) -> None:
    assert server.admin.post("/v1/template/unload").status_code == 200
    try:
        assert client.generate("alpha", "COUNT", system="Be brief.").response == COUNTED
        assert last_request(server).prompt == "Be brief.\n\nCOUNT"
        with pytest.raises(ollama.ResponseError, match="has no chat template"):
            client.chat("alpha", said("COUNT"))
    finally:
        server.admin.post("/v1/template/switch", json={"prompt_template_name": "chatml"})


def test_what_the_model_can_do(client: ollama.Client) -> None:
    assert client.show("alpha").capabilities == ["completion", "tools", "thinking", "vision", "insert"]


def test_a_context_is_told_to_have_no_effect(server: RunningServer) -> None:
    body = {"model": "alpha", "prompt": "COUNT", "context": [1, 2], "stream": False}
    assert server.http.post("/api/generate", json=body).headers[IGNORED_HEADER] == "context"


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": ""}, "model should have at least 1 character"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role is missing"),
        ({"options": {"temperature": 99}}, "options.temperature should be less than or equal to 10"),
        ({"options": {"num_predict": 3, "min_tokens": 5}}, "options.min_tokens"),
        ({"format": "yaml"}, 'format should be "json" or a JSON schema'),
        ({"format": {"type": "nonsense"}}, "format: this JSON schema cannot be used"),
        ({"think": "very"}, "think should be"),
        ({"keep_alive": "soon"}, "keep_alive should be seconds, or a duration such as 5m"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": "hi", "images": ["http://a.example/cat.png"]}]}, "not valid base64"),
        ({"messages": [{"role": "user", "images": ["aGk="] * 20}] * 2}, "messages should hold at most 32 images"),
    ],
)
def test_errors_name_the_field_and_are_texts(server: RunningServer, body: dict[str, Any], problem: str) -> None:
    response = server.http.post("/api/chat", json={"model": "alpha", "messages": said("COUNT")} | body)
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"raw": True, "images": ["aGk="]}, "images"),
        ({"images": ["aGk=", "?"]}, "not valid base64"),
        ({"prompt": "x" * 300_000}, "exceeds the available context size"),
    ],
)
def test_prompts_that_cannot_be_served(server: RunningServer, body: dict[str, Any], problem: str) -> None:
    response = server.http.post("/api/generate", json={"model": "alpha", "prompt": "COUNT"} | body)
    assert response.status_code == 400, response.text
    assert problem in response.json()["error"]


def test_a_name_that_is_no_unicode(server: RunningServer) -> None:
    for path in ("/api/show", "/api/embed", "/api/generate"):
        response = server.admin.post(path, content='{"model": "\\ud800", "input": [], "keep_alive": 0}')
        assert response.status_code == (200 if path == "/api/embed" else 404)
        assert "?" in response.text


def test_a_key_is_needed(server: RunningServer) -> None:
    response = server.anonymous.post("/api/chat", json={"model": "alpha", "messages": said("COUNT")})
    assert (response.status_code, type(response.json()["error"])) == (401, str)


def test_a_stream_that_fails_says_so(client: ollama.Client) -> None:
    stream = client.chat("alpha", said("FAIL"), stream=True)
    assert next(iter(stream)).message.content == "half"
    with pytest.raises(ollama.ResponseError, match="engine"):
        list(stream)


def test_a_body_is_json_whatever_it_is_called(server: RunningServer) -> None:
    """As in Ollama's examples for curl, which call it a form."""
    body = '{"model": "alpha", "prompt": "COUNT", "stream": false}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    response = server.http.post("/api/generate", content=body, headers=form)
    assert response.json()["response"] == COUNTED


# --- loading and unloading ----------------------------------------------------------------------------------------


def test_who_may_not_load_models_has_no_say_in_how_long_they_stay(client: ollama.Client, server: RunningServer) -> None:
    def names_up() -> list[str | None]:
        return [model.model for model in client.ps().models]

    assert [model.model for model in client.list().models] == ["alpha:latest"]
    assert client.generate("alpha").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="admin key"):
        client.generate("alpha", keep_alive=0)
    client.generate("alpha", "COUNT", keep_alive=0)
    assert names_up() == ["alpha:latest"]
    with ollama_client(server.base_url, ADMIN_KEY) as admin:
        assert [model.model for model in admin.list().models] == ["alpha:latest", "beta:latest"]
        chat = admin.chat("alpha", [], keep_alive=0)
        assert (chat.message.content, chat.done_reason) == ("", "unload")
    eventually(lambda: names_up() == [])
