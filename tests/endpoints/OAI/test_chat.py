from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError

from tests.endpoints.running import RunningServer

PIXEL = (  # the smallest GIF
    "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
)
HI = {"messages": [{"role": "user", "content": "COUNT"}]}


def chat(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose terminator is checked."""
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(entry) for entry in data[:-1]]


def streamed(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    return frames(server.http.post("/v1/chat/completions", json=body | {"stream": True}))


def test_the_openai_client_gets_a_whole_answer(server: RunningServer) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "COUNT"}])
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "alpha"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len("one two three")


def test_the_openai_client_gets_a_stream(server: RunningServer) -> None:
    with server.openai() as client:
        stream = client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": "COUNT"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "one two three"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1


def test_frames_of_a_stream(server: RunningServer) -> None:
    events = streamed(server, HI)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "one "},
        {"content": "two "},
        {"content": "three"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, None, "stop"]
    assert events[-1]["choices"][0]["eos_reason"] == "stop_token"
    assert not any("usage" in event for event in events)


def test_usage_comes_last_and_alone_when_asked_for(server: RunningServer) -> None:
    events = streamed(server, HI | {"n": 2, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2 * len("one two three")
    assert not any("usage" in event for event in events[:-1])
    prompt = chat(server, HI)["usage"]["prompt_tokens"]
    assert events[-1]["usage"]["prompt_tokens"] == prompt


def test_timings_are_numbers_or_null(server: RunningServer) -> None:
    usage = chat(server, HI)["usage"]
    for name in ("prompt_time", "completion_time", "total_time"):
        assert isinstance(usage[name], float)
    for name in ("prompt_tokens_per_sec", "completion_tokens_per_sec"):
        assert usage[name] is None  # the scripted engine takes no time


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_each_with_its_index(server: RunningServer, stream: bool) -> None:
    texts = dict.fromkeys(range(3), "")
    if stream:
        for event in streamed(server, HI | {"n": 3}):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        choices = chat(server, HI | {"n": 3})["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = {choice["index"]: choice["message"]["content"] for choice in choices}
    assert texts == dict.fromkeys(range(3), "one two three")


def test_answers_to_one_seed_differ(server: RunningServer) -> None:
    chat(server, HI | {"n": 2, "seed": 7})
    assert [request.seed for request in server.engine.history()[-2:]] == [7, 8]


def test_explicit_null_is_as_absent(server: RunningServer) -> None:
    names = (
        "response_format", "chat_template_kwargs", "n", "stop", "logprobs", "temperature", "stream", "stream_options",
        "tools", "tool_choice", "logit_bias", "reasoning", "max_tokens", "penalty_range", "seed", "user",
    )  # fmt: skip
    message = {"role": "user", "content": "COUNT", "name": None, "tool_calls": None, "tool_call_id": None}
    answer = chat(server, {"messages": [message], **dict.fromkeys(names)})
    given = server.engine.history()[-1]
    chat(server, HI)
    assert given == server.engine.history()[-1]
    assert answer["choices"][0]["message"]["content"] == "one two three"


def test_unknown_fields_are_ignored(server: RunningServer) -> None:
    chat(server, HI | {"min_keep": 1, "service_tier": "auto", "store": True, "metadata": {"a": "b"}})


@pytest.mark.parametrize("limit", [-1, 0, None])
def test_no_limit(server: RunningServer, limit: int | None) -> None:
    assert chat(server, HI | {"max_tokens": limit})["choices"][0]["finish_reason"] == "stop"
    assert server.engine.history()[-1].max_tokens == 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_under_either_name(server: RunningServer, name: str) -> None:
    choice = chat(server, HI | {name: 5})["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one t", "length")


def test_stop_takes_a_string_or_strings_and_token_ids(server: RunningServer) -> None:
    chat(server, HI | {"stop": "x"})
    chat(server, HI | {"stop": ["y", 5]})
    first, second = server.engine.history()[-2:]
    of_template = ["<|im_end|>", "<|im_start|>"]
    assert (first.stop_strings, first.stop_tokens) == (["x", *of_template], [])
    assert (second.stop_strings, second.stop_tokens) == (["y", *of_template], [5])


def test_messages_keep_their_place_and_developer_becomes_system(server: RunningServer) -> None:
    roles = ["developer", "user", "system", "user", "anything"]
    chat(server, {"messages": [{"role": role, "content": f"m{index}"} for index, role in enumerate(roles)]})
    rendered = ["system", "user", "system", "user", "anything"]
    assert server.engine.history()[-1].prompt == (
        "".join(f"<|im_start|>{role}\nm{index}<|im_end|>\n" for index, role in enumerate(rendered))
        + "<|im_start|>assistant\n"
    )


def test_content_parts_are_one_text(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "text", "text": ""}]
    chat(server, {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]})
    assert "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>" in str(
        server.engine.history()[-1].prompt
    )


@pytest.mark.parametrize("url", [PIXEL, {"url": PIXEL}])
def test_images_are_refused_with_the_reason(server: RunningServer, url: object) -> None:
    part = {"type": "image_url", "image_url": url}
    response = server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]},
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages.0.content.1")
    assert "vision" in error["message"]


def test_the_last_message_is_continued(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    chat(server, {"messages": messages, "continue_final_message": True})
    assert str(server.engine.history()[-1].prompt).endswith("<|im_start|>assistant\nWell, ")


def test_response_prefix_is_in_the_prompt_only(server: RunningServer) -> None:
    answer = chat(server, HI | {"response_prefix": "Sure: "})
    assert str(server.engine.history()[-1].prompt).endswith("<|im_start|>assistant\nSure: ")
    assert answer["choices"][0]["message"]["content"] == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_plain_400(server: RunningServer, stream: bool) -> None:
    with server.openai() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x" * 5000}], stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "exceeds the available context size" in caught.value.message


def test_a_failure_inside_a_stream_is_a_frame_before_the_terminator(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "FAIL"}], "stream": True}
    events = frames(server.http.post("/v1/chat/completions", json=body))
    assert events[-2]["choices"][0]["delta"] == {"content": "half"}
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["code"] == "engine_failed"
    with server.openai() as client, pytest.raises(APIError, match="engine"):
        for _ in client.chat.completions.create(model="x", messages=[{"role": "user", "content": "FAIL"}], stream=True):
            pass


def test_one_failed_answer_ends_the_others(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "FAIL"}], "n": 4}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 500
    assert server.requests_in_engine == 0


def test_sampling_reaches_the_engine(server: RunningServer) -> None:
    fields = {
        "temperature": 0.5, "top_k": -1, "presence_penalty": -0.5, "frequency_penalty": -1.5, "logit_bias": {"5": -100},
        "rep_pen": 1.1, "custom_token_bans": "1, 2,x", "dry_sequence_breakers": '"a", "b"', "ignore_eos": True,
        "mirostat_mode": 2, "tfs": 0.5,
    }  # fmt: skip
    chat(server, HI | fields)
    sampling = server.engine.history()[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, -1.5)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.repetition_penalty == 1.1
    assert sampling.banned_tokens == [1, 2]
    assert sampling.dry_sequence_breakers == ["a", "b"]
    assert sampling.ban_eos_token


@pytest.mark.parametrize("arguments", ['{"path": "/srv"}', {"path": "/srv"}, '{"path": "/s', '""', "", None, "[1]"])
def test_a_botched_call_in_the_history_does_not_break_the_chat(server: RunningServer, arguments: object) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    chat(server, {"messages": messages, "tools": [{"type": "function", "function": {"name": "ls"}}]})


def test_a_model_without_template_says_so(empty_server: RunningServer) -> None:
    (empty_server.engine.model_dir / "beta" / "chat_template.jinja").unlink()
    empty_server.load("beta")
    response = empty_server.http.post("/v1/chat/completions", json=HI)
    assert response.status_code == 400
    assert "has no chat template" in response.json()["error"]["message"]
