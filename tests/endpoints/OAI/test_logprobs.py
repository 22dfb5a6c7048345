"""Log-probabilities, whole and in streams, with prompts and without."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.endpoints.OAI.test_chat import chat, streamed
from tests.endpoints.OAI.test_completion import complete, streamed_completion
from tests.endpoints.running import RunningServer

HELD = {"messages": [{"role": "user", "content": "HELD"}], "logprobs": True}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The lists of a stream, put together."""
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    return {name: [item for part in parts for item in part[name]] for name in LISTS}


def test_the_openai_client_reads_those_of_a_chat(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "COUNT"}]
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="x", messages=messages, logprobs=True, top_logprobs=3, max_completion_tokens=3
        )
        chunks = list(
            client.chat.completions.create(
                model="x", messages=messages, logprobs=True, top_logprobs=3, max_completion_tokens=3, stream=True
            )
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list("one")
    assert [entry.bytes for entry in logprobs.content] == [[ord(letter)] for letter in "one"]
    assert [other.token for other in logprobs.content[0].top_logprobs] == ["o", "p", "q"]
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [entry for part in found for entry in part.content or []] == logprobs.content


def test_the_openai_client_reads_those_of_a_completion(server: RunningServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="x", prompt="COUNT", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("one two three")
    assert logprobs.text_offset == list(range(len("one two three")))
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"o": -0.5, "p": -1.5}
    # Not by the strict client: it does not expect that `finish_reason` is null before the end, as it is at OpenAI.
    assert joined(streamed_completion(server, prompt="COUNT", logprobs=2)) == logprobs.model_dump()


def test_a_token_without_text_keeps_its_entry_in_a_chat(server: RunningServer) -> None:
    content = chat(server, HELD)["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == [1, 2, 3, 4]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "aé!"
    pieces = [choice["logprobs"] for event in streamed(server, HELD) for choice in event["choices"]]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content


def test_tokens_that_are_no_characters_in_a_completion(server: RunningServer) -> None:
    logprobs = complete(server, prompt="HELD", logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["top_logprobs"][1] == {"bytes:\\xc3": -1.0, "bytes:\\xc4": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert joined(streamed_completion(server, prompt="HELD", logprobs=1)) == logprobs


@pytest.mark.parametrize("prompt", ["HELD", "xé HELD", [ord(letter) for letter in "HELD"]])
def test_offsets_go_on_after_the_prompt(server: RunningServer, prompt: str | list[int]) -> None:
    text = prompt if isinstance(prompt, str) else "HELD"
    choice = complete(server, prompt=prompt, logprobs=0, echo=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == text + "aé!"
    assert logprobs["tokens"][: len(text)] == list(text)
    assert logprobs["text_offset"] == [*range(len(text)), *(len(text) + offset for offset in (0, 1, 1, 2))]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert joined(streamed_completion(server, prompt=prompt, logprobs=0, echo=True)) == logprobs


def test_evaluation_tools_ask_for_the_prompt_only(server: RunningServer) -> None:
    answer = complete(server, prompt=["COUNT", "ab"], max_tokens=0, echo=True, logprobs=1, temperature=0)
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("COUNT", "ab")
    assert second["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert first["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 0)
    asked = server.engine.history()[-1]
    assert (asked.echo, asked.prompt_only, asked.logprobs) == (True, True, 1)


def test_echo_without_logprobs(server: RunningServer) -> None:
    choice = complete(server, prompt="COUNT", echo=True)["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("COUNTone two three", None)
    events = streamed_completion(server, prompt="COUNT", echo=True)
    assert [choice["text"] for event in events for choice in event["choices"]] == ["COUNT", "one ", "two ", "three", ""]
    assert not server.engine.history()[-1].prompt_only


def test_those_of_a_prompt_as_vllm_gives_them(server: RunningServer) -> None:
    answer = complete(server, prompt=["ab", "COUNT"], prompt_logprobs=2, logprobs=0)
    first, second = answer["choices"]
    assert first["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert len(second["prompt_logprobs"]) == len("COUNT")
    assert second["text"] == "one two three"
    assert second["logprobs"]["tokens"] == list("one two three")
    assert second["logprobs"]["top_logprobs"][0] == {"o": -0.5}  # as many as were asked for
    assert "prompt_logprobs" not in complete(server, prompt="ab")["choices"][0]

    body = {"messages": [{"role": "user", "content": "COUNT"}], "prompt_logprobs": 1, "n": 2}
    chat_answer = chat(server, body)
    prompts = server.engine.history()[-2:]
    assert len(chat_answer["prompt_logprobs"]) == len(prompts[0].prompt)
    assert [request.echo for request in prompts] == [True, False]
    assert [choice["message"]["content"] for choice in chat_answer["choices"]] == ["one two three"] * 2
    assert chat_answer["choices"][0]["logprobs"] is None


def test_an_answer_without_tokens_has_empty_lists(server: RunningServer) -> None:
    logprobs = complete(server, prompt="EMPTY", logprobs=1)["choices"][0]["logprobs"]
    assert logprobs == {name: [] for name in LISTS}
    answer = chat(server, {"messages": [{"role": "user", "content": "EMPTY"}], "logprobs": True})
    assert answer["choices"][0]["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": "many"}, "logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_is_refused(server: RunningServer, path: str, fields: dict[str, object], param: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    response = server.http.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
