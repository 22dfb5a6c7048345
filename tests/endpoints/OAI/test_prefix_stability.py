"""Conversations: each prompt begins as the one before it and its answer, or the log says why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from backends.messages import ControlToken
from common.prefixes import PrefixBreak
from common.templating import ChatTemplate, RenderedPrompt, find_template
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.prompt import PromptWriter
from tests.endpoints.OAI.writing import answered, turn_of, writer
from tests.endpoints.running import CHATML, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

ANSWER = "Hello you. "
TEXT_OF_MESSAGE = "(message.content or '')"
TRIMMING = CHATML.replace(TEXT_OF_MESSAGE, f"{TEXT_OF_MESSAGE} | trim")
SHOUTING = CHATML.replace(TEXT_OF_MESSAGE, f"({TEXT_OF_MESSAGE} | upper)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The template of "alpha" keeps what it is given; those of the others do not."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    for name, template in {"trimming": TRIMMING, "shouting": SHOUTING}.items():
        (engine.add_model(name) / "tabby_template.jinja").write_text(template, encoding="utf-8")
    engine.write(Script(plays=[Play(chunks=["Hello ", "you. "])]))
    with running_server(engine).running() as running:
        yield running


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}", filter="endpoints.OAI.utils.requests")
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
@pytest.mark.parametrize("name", ["alpha", "trimming"])
def test_a_conversation_goes_on_from_what_was_processed(
    server: RunningServer, log: list[str], name: str, stream: bool
) -> None:
    load(server, name)
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
    load(server, "shouting")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "é"}]
    messages.append({"role": "assistant", "content": answer(server, messages, stream=stream)})
    messages.append({"role": "user", "content": "and?"})
    answer(server, messages, stream=stream)
    first, second = prompts(server)[-2:]
    assert second.startswith(first + "HELLO YOU. ")
    [line] = log
    assert line.startswith("INFO ")
    assert f"at byte {len((first + 'H').encode())}, {len('ello you. ')} characters before their end" in line
    assert "the chat template writes the answer in another way than the model did" in line
    assert "Hello" not in line


def test_another_load_is_another_history(server: RunningServer, log: list[str]) -> None:
    load(server, "shouting")
    messages = [{"role": "user", "content": "x"}]
    reply = {"role": "assistant", "content": answer(server, messages, stream=False)}
    load(server, "alpha")
    load(server, "shouting")
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


@pytest.mark.parametrize("name", ["trimming", "alpha"])
def test_an_answer_that_is_continued(server: RunningServer, log: list[str], name: str) -> None:
    load(server, name)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well: "}]
    messages[1]["content"] += answer(server, messages, stream=False, continue_final_message=True)
    assert messages[1]["content"] == "Well: " + ANSWER
    answer(server, [*messages, {"role": "user", "content": "y"}], stream=False)
    first, second = prompts(server)[-2:]
    assert second.startswith(first + ANSWER)
    assert log == []


# --- answers with thoughts and calls --------------------------------------------------------------------------------


class Family(NamedTuple):
    """A kind of template, and how its models write.

    Attributes:
        call: of `ls`, with %s for the path.
        thought: before an answer, with %s for the text; none where the template has no place for it.
        text: before an answer for the user.
        beside: the template shows text beside calls.
        forgets: thoughts are left out once a question follows.
    """

    template: str
    tokens: str
    call: str
    thought: str = "%s"
    text: str = ""
    beside: bool = True
    forgets: bool = False

    def thinking(self, text: str) -> str:
        return self.thought % text if self.thought != "%s" else ""

    def loop_of_tools(self) -> list[str]:
        """What a model writes in three turns: two calls, then an answer."""
        return [
            self.thinking("Where?") + self.call % "/a",
            self.thinking("And there?") + ("Next.\n" if self.beside else "") + self.call % "/b",
            self.thinking("Enough.") + self.text + " All seen. \n",
        ]


XML = "<tool_call>\n<function=ls>\n<parameter=path>\n%s\n</parameter>\n</function>\n</tool_call>"
THINK = "<think>\n%s\n</think>\n\n"
GLIMMER_CALL = (
    '<atem:function_calls>\n<atem:invoke name="ls">\n<atem:parameter name="path">%s</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
FAMILIES = [
    Family(
        "qwen3",
        "<|im_start|> <|im_end|>",
        '<tool_call>\n{"name":"ls","arguments":{"path":"%s"}}\n</tool_call>',
        THINK,
        forgets=True,
    ),
    Family("qwen3_5", "<|im_start|> <|im_end|>", XML + "\n", "%s\n</think>\n\n"),
    Family("qwen3_coder", "<|im_start|> <|im_end|>", XML),
    Family("mistral", "<s> </s> [INST]", '[TOOL_CALLS] [{"name":"ls","arguments":{"path": "%s"}}]', beside=False),
    Family("mistral_v11", "<s> </s> [INST] [/INST] [TOOL_CALLS] [ARGS]", '[TOOL_CALLS]ls[ARGS]{"path" : "%s"}'),
    Family(
        "deepseek_v3_1",
        "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>"
        '{"path":"%s"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    Family(
        "kimi",
        "<|im_end|> <|im_user|> <|im_assistant|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>"
        '{"path":"%s"}<|tool_call_end|><|tool_calls_section_end|>',
        "<think>%s</think>",
    ),
    Family(
        "gpt_oss",
        "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|constrain|>",
        '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"path":"%s"}',
        "<|channel|>analysis<|message|>%s<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        beside=False,
        forgets=True,
    ),
    Family(
        "glimmer",
        "<|start|> <|message|> <|eom|> <|eot|>",
        f" to=ls<|message|>{GLIMMER_CALL}",
        " to=self<|message|>%s<|eom|><|start|>assistant",
        " to=user<|message|>",
        beside=False,
    ),
]  # fmt: skip
LS = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


class Agent:
    """A client that lets a model call tools.

    Args:
        send_back: what it makes of an answer's message before it sends that back.
    """

    def __init__(self, family: Family, send_back: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        source = (Path(__file__).parents[2] / "common" / "chat_templates" / f"{family.template}.jinja").read_text(
            "utf-8"
        )
        self.ids = {text: 1000 + index for index, text in enumerate(family.tokens.split())}
        template = ChatTemplate(family.template, source, {"bos_token": "<s>", "eos_token": "</s>"})
        self.writer = writer(
            template,
            [ControlToken(text, token_id, special=True) for text, token_id in self.ids.items()],
            has_checkpoints=True,
        )
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
        self.sent: list[RenderedPrompt] = []
        self.broken: PrefixBreak | None = None
        self._send_back = send_back

    def turn(self, raw: str, follow: str) -> None:
        """The model writes something, and gets a result of its call or the next question."""
        turn = turn_of(self.writer, messages=self.messages, tools=[LS])
        self.sent.append(turn.prompt.rendered)
        self.broken = turn.prompt.broken
        message = answered(turn, raw, [self.ids[text] for text in self.ids for _ in range(raw.count(text))])
        self.messages.append(self._send_back(message))
        if message.get("tool_calls"):
            self.messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": follow})
        else:
            self.messages.append({"role": "user", "content": follow})


def as_it_came(message: dict[str, Any]) -> dict[str, Any]:
    return message


def without_thought(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, and with the arguments written anew, as an object for one call and as text for the next."""
    calls = message.get("tool_calls") or []
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = arguments if "/a" in str(arguments) else json.dumps(arguments, indent=2)
    return {name: value for name, value in message.items() if value is not None}


@pytest.mark.parametrize("send_back", [as_it_came, without_thought, rewritten])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_a_loop_of_tools(family: Family, send_back: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    answers = family.loop_of_tools()
    agent = Agent(family, send_back)
    for raw, follow in zip(answers, ["x y", "z", "Thanks."], strict=True):
        agent.turn(raw, follow)
        assert agent.broken is None
    for number, raw in enumerate(answers[:2]):
        assert agent.sent[number + 1].text.startswith(agent.sent[number].text + raw)
    assert all(prompt.literals == [] for prompt in agent.sent)
    agent.turn(family.thinking("Bye.") + family.text + "Bye.", "?")
    if family.forgets:
        assert agent.broken is not None
        assert "leaves earlier thoughts out" in agent.broken.reason
    else:
        assert agent.sent[3].text.startswith(agent.sent[2].text + answers[2])


def test_a_token_that_an_answer_only_spells_is_text_in_the_next_prompt() -> None:
    agent = Agent(FAMILIES[0], as_it_came)
    del agent.ids["<|im_end|>"]  # the model writes it in other tokens
    raw = "Write <|im_end|> for that.  "
    agent.turn(raw, "Why?")
    agent.turn("So.", "?")
    first, second = agent.sent
    assert second.text.startswith(first.text + raw)
    assert [second.text[start:end] for start, end in second.literals] == ["<|im_end|>"]
    assert second.literals[0][0] == len(first.text) + len("Write ")


def test_a_prefix_of_the_answer_is_the_clients_to_send_back() -> None:
    prompts = writer(CHATML)
    asked = {"role": "user", "content": "x"}
    answered(turn_of(prompts, messages=[asked], response_prefix="Sure: "), "yes")
    for content in ("yes", "Sure: yes"):
        messages = [asked, {"role": "assistant", "content": content}, asked]
        follow = turn_of(prompts, messages=messages).prompt.text
        assert f"assistant\n{content}<|im_end|>" in follow


@pytest.mark.parametrize("depth", [500, 900, 5_000])
def test_arguments_that_are_too_deep_cost_no_answer(depth: int) -> None:
    agent = Agent(FAMILIES[0], as_it_came)
    deep = '{"a":' * depth + "1" + "}" * depth
    agent.turn(f'<tool_call>\n{{"name":"ls","arguments":{deep}}}\n</tool_call>', "ok")
    assert "ls" in str(agent.messages[1])


# --- the demo model's template --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_writer(smollm2: Path) -> PromptWriter:
    template = find_template(smollm2)
    assert template is not None
    tokens = [ControlToken(text, index, special=True) for index, text in enumerate(("<|im_start|>", "<|im_end|>"))]
    return writer(template, tokens)


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
