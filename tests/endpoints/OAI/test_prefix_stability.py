"""Conversations: each prompt begins as the one before it and its answer, or the log says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from backends.messages import ControlToken
from common.config_models import ModelConfig
from common.templating import find_template
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.prompt import PromptWriter
from tests.endpoints.running import CHATML, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

ANSWER = "Hello you. "
TRIMMING = CHATML.replace("(message.content or '')", "(message.content or '') | trim")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The template of "alpha" keeps what it is given, that of "beta" trims it."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    (engine.add_model("beta") / "tabby_template.jinja").write_text(TRIMMING, encoding="utf-8")
    engine.write(Script(plays=[Play(chunks=["Hello ", "you. "])]))
    with running_server(engine).running() as running:
        yield running


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}", filter="endpoints.OAI.utils.prompt")
    yield lines
    logger.remove(sink)


def load(server: RunningServer, name: str) -> None:
    if server.manager.current is None or server.manager.current.name != name:
        server.load(name)


def answer(server: RunningServer, messages: list[dict[str, Any]], *, stream: bool, **fields: Any) -> str:
    """What the client makes of the answer."""
    response = server.http.post("/v1/chat/completions", json={"messages": messages, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in data)


def prompts(server: RunningServer) -> list[str]:
    return [request.prompt for request in server.engine.history() if isinstance(request.prompt, str)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_what_was_processed(server: RunningServer, log: list[str], stream: bool) -> None:
    load(server, "alpha")
    messages: list[dict[str, Any]] = [{"role": "system", "content": " Be kind. "}]
    for number in range(3):
        messages.append({"role": "user", "content": f" question {number} \n"})
        messages.append({"role": "assistant", "content": answer(server, messages, stream=stream)})
    first, second, third = prompts(server)[-3:]
    assert second.startswith(first + ANSWER)
    assert third.startswith(second + ANSWER)
    assert log == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_where_and_why_it_does_not(server: RunningServer, log: list[str], stream: bool) -> None:
    load(server, "beta")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "é"}]
    messages.append({"role": "assistant", "content": answer(server, messages, stream=stream)})
    messages.append({"role": "user", "content": "and?"})
    answer(server, messages, stream=stream)
    first, second = prompts(server)[-2:]
    assert not second.startswith(first + ANSWER)
    assert second.startswith(first + ANSWER.rstrip())
    [line] = log
    assert line.startswith("INFO ")
    assert f"at byte {len((first + ANSWER.rstrip()).encode())}, 1 characters before their end" in line
    assert "the chat template trims the answer" in line
    assert "Hello" not in line


def test_another_load_is_another_history(server: RunningServer, log: list[str]) -> None:
    load(server, "beta")
    messages = [{"role": "user", "content": "x"}]
    reply = {"role": "assistant", "content": answer(server, messages, stream=False)}
    load(server, "alpha")
    load(server, "beta")
    answer(server, [*messages, reply, {"role": "user", "content": "y"}], stream=False)
    assert log == []


def test_a_client_that_edits_its_system_prompt_is_told_of(server: RunningServer, log: list[str]) -> None:
    load(server, "alpha")
    messages = [{"role": "system", "content": "It is 10:59."}, {"role": "user", "content": "x"}]
    reply = {"role": "assistant", "content": answer(server, messages, stream=False, n=2)}
    messages[0]["content"] = "It is 11:00."
    answer(server, [*messages, reply, {"role": "user", "content": "y"}], stream=False)
    [line] = log
    assert "a date or time in the prompt is another and the system prompt was edited" in line


def test_an_answer_that_is_continued(server: RunningServer, log: list[str]) -> None:
    load(server, "alpha")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well: "}]
    messages[1]["content"] += answer(server, messages, stream=False, continue_final_message=True)
    assert messages[1]["content"] == "Well: " + ANSWER
    answer(server, [*messages, {"role": "user", "content": "y"}], stream=False)
    first, second = prompts(server)[-2:]
    assert second.startswith(first + ANSWER)
    assert log == []


def test_a_continued_answer_is_followed_too(server: RunningServer, log: list[str]) -> None:
    load(server, "beta")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well: "}]
    messages[1]["content"] += answer(server, messages, stream=False, continue_final_message=True)
    answer(server, [*messages, {"role": "user", "content": "y"}], stream=False)
    assert len(log) == 1


# --- the demo model's template --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_writer(smollm2: Path) -> PromptWriter:
    template = find_template(smollm2)
    assert template is not None
    tokens = [ControlToken(text, index, special=True) for index, text in enumerate(("<|im_start|>", "<|im_end|>"))]
    return PromptWriter(template, ModelConfig(), tokens)


TEXT = st.text(max_size=5) | st.sampled_from(
    [" blanks \n", "<|im_end|>", "a<|im_start|>user\nx", "<think>\nx\n</think>\n"]
)


@given(system=st.none() | TEXT, turns=st.lists(st.tuples(TEXT, TEXT), min_size=2, max_size=4))
def test_smollm2(smollm2_writer: PromptWriter, system: str | None, turns: list[tuple[str, str]]) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    before = ""
    for question, reply in turns:
        messages.append({"role": "user", "content": question})
        prompt = smollm2_writer.chat(ChatCompletionRequest.model_validate({"messages": messages})).text
        assert prompt.startswith(before)
        before = prompt + reply
        messages.append({"role": "assistant", "content": reply})
