"""Thoughts in requests and in responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.generation import GenerationRequest, Thoughts
from endpoints.OAI.utils.chat import ChatTurn
from tests.endpoints.OAI.test_chat import chat, streamed
from tests.endpoints.OAI.writing import answered, turn_of, writer
from tests.endpoints.running import CHATML, RunningServer, running_server
from tests.samples import TEMPLATES
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

PLAYS = [
    Play(when="THINK", chunks=["<thi", "nk>\npl", "an\n</think", ">\n\nHi", " you."]),
    Play(when="ONLY", chunks=["<think>\nplan"]),
]
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    (engine.add_model("qwen3") / "tabby_template.jinja").write_text(QWEN3, encoding="utf-8")
    engine.write(Script(plays=PLAYS))
    with running_server(engine).running() as running:
        running.load("qwen3")
        yield running


def said(text: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def message(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = chat(server, body)["choices"][0]["message"]
    return answer


def joined(server: RunningServer, body: dict[str, Any]) -> dict[str, str]:
    """The texts of a stream's deltas."""
    texts: dict[str, str] = {}
    for event in streamed(server, body):
        for name, text in event["choices"][0]["delta"].items():
            if text:
                texts[name] = texts.get(name, "") + text
    return texts


def last(server: RunningServer) -> GenerationRequest:
    return server.engine.history()[-1]


def told(turn: ChatTurn) -> Thoughts:
    """What the engine is told of thoughts."""
    thoughts = turn.requests()[0].thoughts
    assert thoughts is not None
    return thoughts


def thoughts(**fields: object) -> Thoughts:
    return told(turn_of(writer(QWEN3), **said("x"), **fields))


# --- responses ------------------------------------------------------------------------------------------------------

RAW = "<think>\nplan\n</think>\n\nHi you."


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {"content": "Hi you.", "reasoning_content": "plan"}),
        ({"include_reasoning": None}, {"content": "Hi you.", "reasoning_content": "plan"}),
        ({"include_reasoning": True}, {"content": "Hi you.", "reasoning_content": "plan", "reasoning": "plan"}),
        ({"include_reasoning": False}, {"content": "Hi you."}),
        ({"reasoning": {"exclude": True}}, {"content": "Hi you."}),
        ({"reasoning_format": "hidden"}, {"content": "Hi you."}),
        ({"reasoning_format": "deepseek"}, {"content": "Hi you.", "reasoning_content": "plan"}),
        ({"reasoning_format": "auto"}, {"content": "Hi you.", "reasoning_content": "plan"}),
        ({"reasoning_format": "none"}, {"content": RAW}),
    ],
)
def test_where_a_thought_goes(server: RunningServer, fields: dict[str, Any], shown: dict[str, str]) -> None:
    expected = {"role": "assistant", **shown}
    assert message(server, said("THINK") | fields) == expected | {"refusal": None}
    assert joined(server, said("THINK") | fields) == expected


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}])
def test_nothing_but_a_thought(server: RunningServer, fields: dict[str, Any]) -> None:
    [choice] = chat(server, said("ONLY") | fields)["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"].get("reasoning_content") == (None if fields else "plan")
    assert choice["finish_reason"] == "stop"


def test_the_openai_client_takes_thoughts(server: RunningServer) -> None:
    with server.openai() as client:
        asked: Any = {"model": "x", "messages": [{"role": "user", "content": "THINK"}]}
        whole = client.chat.completions.create(**asked).choices[0].message
        assert (whole.content, getattr(whole, "reasoning_content", None)) == ("Hi you.", "plan")
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "plan"
    assert "".join(delta.content or "" for delta in deltas) == "Hi you."


def test_tokens_of_thoughts_are_counted(server: RunningServer) -> None:
    usage = chat(server, said("THINK"))["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    asked = said("THINK", stream_options={"include_usage": True})
    last_event = streamed(server, asked)[-1]
    assert last_event["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    assert chat(server, said("x"))["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_logprobs_are_those_of_the_content(server: RunningServer) -> None:
    [choice] = chat(server, said("THINK", logprobs=True))["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Hi you."


def test_text_completions_are_left_as_they_are(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "THINK"})
    assert response.json()["choices"][0]["text"] == RAW
    assert last(server).thoughts is None


# --- where an answer begins -----------------------------------------------------------------------------------------

REST = "n B\n</think>\n\nHi you."


def test_an_answer_that_goes_on_from_a_thought() -> None:
    turn = turn_of(writer(QWEN3), **said("x"), response_prefix="<think>\nplan A, pla")
    answer = answered(turn, REST)
    assert (answer["content"], answer["reasoning_content"]) == ("Hi you.", "n B")
    assert told(turn).inside


def test_a_message_that_is_continued_within_its_thought() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>\nplan A, pla"}]
    turn = turn_of(writer(CHATML, reasoning_mode="on"), messages=messages, continue_final_message=True)
    answer = answered(turn, REST)
    assert (answer["content"], answer["reasoning_content"]) == ("Hi you.", "n B")
    assert told(turn).inside


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"start_in_reasoning": "always"}, {"content": "Hi you.", "reasoning_content": "n B"}),
        ({"start_in_reasoning": "never"}, {"content": REST}),
        ({"reasoning_mode": "off", "start_in_reasoning": "always"}, {"content": REST}),
    ],
)
def test_settings_win_over_the_prompt(settings: dict[str, Any], shown: dict[str, str]) -> None:
    turn = turn_of(writer(QWEN3, **settings), **said("x"))
    assert answered(turn, REST) == {"role": "assistant", "refusal": None, **shown}


def test_harmony_says_itself_where_a_thought_begins() -> None:
    template = (TEMPLATES / "gpt_oss.jinja").read_text(encoding="utf-8")
    turn = turn_of(writer(template, start_in_reasoning="always"), **said("x"))
    assert told(turn) == Thoughts(dialect="harmony")
    assert answered(turn, "<|channel|>final<|message|>Hi.")["content"] == "Hi."


# --- requests -------------------------------------------------------------------------------------------------------


def test_what_the_engine_is_told() -> None:
    assert thoughts() == Thoughts(dialect="tags", start="<think>", end="</think>")
    assert turn_of(writer(QWEN3, reasoning_mode="off"), **said("x")).requests()[0].thoughts is None


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_budget_tokens": 7},
        {"reasoning_budget": 7},
        {"thinking_budget": 7},
        {"thinking_budget_tokens": 7},
        {"thinking_token_budget": 7},
        {"max_thinking_tokens": 7},
        {"reasoning": {"max_tokens": 7}},
        {"reasoning": {"budget_tokens": 7}},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning_budget_tokens": -1, "reasoning": {"max_tokens": 7}},
        {"reasoning_budget_tokens": 7, "reasoning": {"max_tokens": 9}},
    ],
)
def test_a_budget_under_any_name(fields: dict[str, Any]) -> None:
    assert thoughts(**fields).budget == 7


def test_the_budget_of_the_model_where_a_request_has_none() -> None:
    prompts = writer(QWEN3, reasoning_budget_tokens=3, reasoning_budget_message="Enough.")

    def limit(**fields: object) -> tuple[int | None, str]:
        asked = told(turn_of(prompts, **said("x"), **fields))
        return asked.budget, asked.message

    assert limit() == (3, "Enough.")
    assert limit(reasoning_budget=-1) == (3, "Enough.")
    assert limit(reasoning_budget=0, reasoning_budget_message="") == (0, "")
    assert limit(thinking_budget_message="Stop.") == (3, "Stop.")
    prompts = writer(QWEN3, reasoning_budget_tokens=-1)
    assert limit() == (None, "")


def test_a_budget_ends_a_thought(server: RunningServer) -> None:
    answer = message(server, said("THINK", reasoning_budget=2, reasoning_budget_message="Enough."))
    assert answer["reasoning_content"].endswith("Enough.")


@pytest.mark.parametrize(
    ("fields", "off"),
    [
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": False}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning": {"effort": "none"}}, True),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, False),
        ({"thinking": {"type": "adaptive"}}, False),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, False),
        ({"reasoning_effort": "none", "template_vars": {"enable_thinking": True}}, False),
    ],
)
def test_thinking_can_be_turned_off_under_any_name(fields: dict[str, Any], off: bool) -> None:
    prompt = turn_of(writer(QWEN3), **said("x"), **fields).prompt.text
    assert prompt.endswith("<think>\n\n</think>\n\n") is off


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_budget": "x"}, "reasoning_budget"),
        ({"thinking": {"budget_tokens": 1.5}}, "thinking.budget_tokens"),
        ({"thinking": "on"}, "thinking"),
        ({"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens"),
        ({"reasoning_format": "x"}, "reasoning_format"),
        ({"include_reasoning": "x"}, "include_reasoning"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.http.post("/v1/chat/completions", json=said("x") | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
