"""What streams carry beside text, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.endpoints.OAI.test_chat import chat, frames
from tests.endpoints.running import RunningServer

PATHS = ["chat/completions", "completions"]
PROGRESS = "PROGRESS".ljust(600, ".")


def stream(server: RunningServer, path: str, text: str, **fields: object) -> list[dict[str, Any]]:
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "stream": True, **fields}
    return frames(server.http.post(f"/v1/{path}", json=body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wish", [{"return_progress": True}, {"stream_options": {"include_progress": True}}])
def test_the_prefill_is_told_on_request(server: RunningServer, path: str, wish: dict[str, object]) -> None:
    events = stream(server, path, PROGRESS, **wish)
    told = [event for event in events if "prompt_progress" in event]
    assert events[:2] == told
    assert [event["choices"] for event in told] == [[], []]
    numbers = [{name: event["prompt_progress"][name] for name in ("total", "cache", "processed")} for event in told]
    assert numbers == [
        {"total": 600, "cache": 128, "processed": 256},
        {"total": 600, "cache": 128, "processed": 600},
    ]
    assert all(event["prompt_progress"]["time_ms"] >= 0 for event in told)
    assert not any("prompt_progress" in event for event in stream(server, path, PROGRESS))


def test_the_openai_client_reads_a_stream_with_everything(server: RunningServer) -> None:
    extra = {"stream_options": {"include_usage": True, "include_progress": True, "continuous_usage_stats": True}}
    with server.openai() as client:
        chunks = list(
            client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": PROGRESS}], stream=True, extra_body=extra
            )
        )
    assert [chunk.choices for chunk in chunks[:2]] == [[], []]
    assert chunks[2].choices[0].delta.role == "assistant"
    assert all(chunk.usage for chunk in chunks[2:])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 7
    assert usage.completion_tokens_details.rejected_prediction_tokens == 2
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 128


@pytest.mark.parametrize("path", PATHS)
def test_the_last_chunk_of_an_answer_says_how_it_ended(server: RunningServer, path: str) -> None:
    last = stream(server, path, "STOP")[-1]["choices"][0]
    assert (last["finish_reason"], last["eos_reason"], last["stop_str"]) == ("stop", "stop_string", "###")
    last = stream(server, path, "STOP", max_tokens=2)[-1]["choices"][0]
    assert (last["finish_reason"], last["eos_reason"]) == ("length", "max_new_tokens")
    assert "stop_str" not in last


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_is_the_last_event(server: RunningServer, path: str) -> None:
    events = stream(server, path, "FAIL", n=2)
    assert events[-1]["error"]["code"] == "engine_failed"
    assert not any("error" in event for event in events[:-1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [True, False, None])
def test_usage_comes_once_and_only_when_asked_for(server: RunningServer, path: str, asked: bool | None) -> None:
    events = stream(server, path, "COUNT", n=2, stream_options={"include_usage": asked})
    with_usage = [event for event in events if "usage" in event]
    assert with_usage == (events[-1:] if asked else [])
    if asked:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 2 * len("one two three")


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_a_whole_answer_always_has_usage(server: RunningServer, options: object) -> None:
    answer = chat(server, {"messages": [{"role": "user", "content": "COUNT"}], "stream_options": options})
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["queue_time"] == 0.0


def test_every_answer_of_a_chat_begins_with_its_role(server: RunningServer) -> None:
    events = stream(server, "chat/completions", "EMPTY", n=3)
    for index in range(3):
        pieces = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [piece["delta"] for piece in pieces] == [{"role": "assistant", "content": ""}, {}]
        assert pieces[-1]["finish_reason"] == "stop"
