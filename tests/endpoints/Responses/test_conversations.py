"""Items of an input as messages of a chat, and conversations whose prompts go on from what was generated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from pydantic import TypeAdapter

from backends.messages import ControlToken
from common.errors import InvalidRequest, Unsupported
from common.generation import Event, Finish, TextDelta, Usage
from common.prefixes import PrefixBreak
from common.templating import ChatTemplate, RenderedPrompt
from endpoints.OAI.utils.chat import ChatTurn
from endpoints.Responses.types.items import InputItem
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.utils.begin import new_response
from endpoints.Responses.utils.codec import ResponseCodec
from endpoints.Responses.utils.output import Output, TextArgument, text_of
from endpoints.Responses.utils.requests import ChatRequest
from endpoints.Responses.utils.store import ResponseStore
from endpoints.Responses.utils.thoughts import sealed, unsealed
from endpoints.streaming import Queued
from tests.endpoints.OAI.test_prefix_stability import FAMILIES, Family
from tests.endpoints.OAI.writing import writer
from tests.endpoints.Responses.asking import LS

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What a chat completion gets of some items."""
    request = ResponsesRequest.model_validate({"input": list(items), **fields})
    chat = ChatRequest(request, [], request.input).body
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def texts(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"]]


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"path":"/"}', "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a b"}

# --- items --------------------------------------------------------------------------------------------------------


def test_the_forms_of_a_message() -> None:
    plain = {"role": "user", "content": "hi"}
    typed = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    of_texts = {"role": "user", "content": ["hi"]}
    assert messages(plain) == messages(typed) == messages(of_texts)
    developer, user = messages({"role": "developer", "content": "x"}, plain, instructions=None)
    assert (developer["role"], user["role"]) == ("developer", "user")
    [instructed, _] = messages(plain, instructions="Be brief.")
    assert (instructed["role"], texts(instructed)) == ("system", ["Be brief."])


def test_an_answer_is_one_message() -> None:
    [answer, result] = messages(THOUGHT, SAID, CALL, {**CALL, "call_id": "c2"}, RESULT)
    assert answer["reasoning_content"] == "hm"
    assert texts(answer) == ["I look."]
    assert [(call["id"], call["function"]["name"]) for call in answer["tool_calls"]] == [("c1", "ls"), ("c2", "ls")]
    assert (result["role"], result["tool_call_id"], texts(result)) == ("tool", "c1", ["a b"])


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([SAID, SAID], ["assistant", "assistant"]),
        ([SAID, THOUGHT, SAID], ["assistant"]),
        ([CALL, RESULT, THOUGHT, SAID], ["assistant", "tool", "assistant"]),
        ([CALL, SAID, RESULT], ["assistant", "tool"]),
    ],
)
def test_where_an_answer_ends(items: list[dict[str, Any]], roles: list[str]) -> None:
    assert [message["role"] for message in messages(*items)] == roles


@pytest.mark.parametrize(
    ("thought", "text"),
    [
        ({"encrypted_content": sealed("deep é")}, "deep é"),
        ({"encrypted_content": sealed("deep"), "summary": [{"type": "summary_text", "text": "short"}]}, "deep"),
        ({"encrypted_content": "gAAAA-of-another-server", "summary": [{"text": "a"}, {"text": "b"}]}, "ab"),
        ({"encrypted_content": sealed("x")[:-1]}, None),
        ({"content": [{"text": "deep"}], "summary": [{"text": "short"}]}, "deep"),
        ({"content": None, "summary": []}, None),
    ],
)
def test_the_forms_of_a_thought(thought: dict[str, Any], text: str | None) -> None:
    [answer] = messages({"type": "reasoning", **thought}, SAID)
    assert answer.get("reasoning_content") == text


def test_a_sealed_thought_survives() -> None:
    for text in ("", "x", "é😀\n", "a" * 1000):
        assert unsealed(sealed(text)) == text
    assert unsealed("waypoint1.%%%") is None


def test_calls_of_other_tools() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'}
    grouped = {**CALL, "namespace": "team"}
    shell = {
        "type": "local_shell_call",
        "id": "l",
        "call_id": "c3",
        "action": {"command": ["ls"]},
        "status": "completed",
    }
    done = {"type": "local_shell_call_output", "id": "c3", "output": "a b"}
    patched = {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed", "output": None}
    answer, result, nothing = messages(custom, grouped, shell, done, patched)
    functions = [call["function"] for call in answer["tool_calls"]]
    assert [function["name"] for function in functions] == ["patch", "team__ls", "local_shell"]
    assert json.loads(functions[0]["arguments"]) == {"input": 'a "b"'}
    assert json.loads(functions[2]["arguments"]) == {"action": {"command": ["ls"]}}
    assert (result["tool_call_id"], texts(result)) == ("c3", ["a b"])
    assert texts(nothing) == ["null"]


def test_a_call_that_was_broken_off_is_not_told_again() -> None:
    assert [message["role"] for message in messages(SAID, {**CALL, "status": "incomplete"})] == ["assistant"]
    assert "tool_calls" not in messages(SAID, {**CALL, "status": "incomplete"})[0]


def test_more_tools_among_the_items() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [LS]}
    request = ResponsesRequest.model_validate({"input": [more, {"content": "x"}]})
    assert [tool["function"]["name"] for tool in ChatRequest(request, [], request.input).tools.chat] == ["ls"]
    broken = ResponsesRequest.model_validate({"input": [{**more, "tools": [{"type": "function"}]}]})
    with pytest.raises(InvalidRequest, match="additional_tools"):
        ChatRequest(broken, [], broken.input)


def test_an_image_keeps_its_place() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
    [message] = messages({"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]})
    assert message["content"][1]["image_url"] == {"url": "data:image/png;base64,AAAA"}
    with pytest.raises(Unsupported, match=r"input\.0\.output\.0\.file_id"):
        messages({**RESULT, "output": [{"type": "input_image", "file_id": "f"}]})


# --- tools --------------------------------------------------------------------------------------------------------


def chat_request(**fields: Any) -> ChatRequest:
    request = ResponsesRequest.model_validate({"input": "x", **fields})
    return ChatRequest(request, [], request.input)


def test_tools_in_the_order_of_the_request() -> None:
    custom = {"type": "custom", "name": "patch", "description": "Edits."}
    group = {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "close"}, custom]}
    chat = chat_request(tools=[group, LS, {"type": "image_generation"}, custom])
    names = [tool["function"]["name"] for tool in chat.tools.chat]
    assert names == ["team__close", "team__patch", "ls", "patch"]
    assert chat.tools.paths == ["tools.0.tools.0", "tools.0.tools.1", "tools.1", "tools.3"]
    assert chat.left_out == ["image_generation"]
    assert chat.tools.called("team__patch")[1:] == ("patch", "team", True)


@pytest.mark.parametrize(
    ("form", "strict", "described"),
    [
        (None, False, "Edits."),
        ({"type": "text"}, False, "Edits."),
        ({"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}, False, "start: /x+/"),
        ({"type": "grammar", "syntax": "regex", "definition": "x|y"}, True, "x|y"),
    ],
)
def test_a_tool_that_takes_a_text(form: dict[str, Any] | None, strict: bool, described: str) -> None:
    [tool] = chat_request(tools=[{"type": "custom", "name": "p", "description": "Edits.", "format": form}]).tools.chat
    function = tool["function"]
    assert function["strict"] is strict
    assert described in function["description"]
    assert function["parameters"]["properties"]["input"].get("pattern") == ("^(?:x|y)$" if strict else None)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("required", "required"),
        ({"type": "function", "name": "ls"}, {"type": "function", "function": {"name": "ls"}}),
        ({"type": "function", "name": "close", "namespace": "team"},
         {"type": "function", "function": {"name": "team__close"}}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "ls"}, {"type": "mcp"}]},
         {"type": "allowed_tools",
          "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "ls"}}]}}),
    ],
)  # fmt: skip
def test_the_choice_of_a_tool(choice: object, chosen: object) -> None:
    request = ResponsesRequest.model_validate({"input": "x", "tools": [LS], "tool_choice": choice})
    assert ChatRequest(request, [], request.input).tools.choice(request.tool_choice) == chosen


TEXT = 'a "b" \\ é \u2028 😀\n\t/'


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 1000])
def test_the_text_of_a_call_as_it_is_generated(ascii_only: bool, length: int) -> None:
    arguments = json.dumps({"input": TEXT}, ensure_ascii=ascii_only, indent=1)
    reader = TextArgument()
    pieces = [reader.feed(arguments[start : start + length]) for start in range(0, len(arguments), length)]
    assert "".join(pieces) == TEXT == text_of(arguments)
    assert reader.length == len(TEXT)


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', '{"input": 5}', "[1]", "no json", '{"input": "\\x"}'])
def test_arguments_of_another_shape_are_the_text(arguments: str) -> None:
    assert TextArgument().feed(arguments) == ""
    assert text_of(arguments) == arguments


# --- the prompts of a conversation ----------------------------------------------------------------------------------

Item: TypeAlias = dict[str, Any]


class Agent:
    """A client that lets a model call tools.

    Args:
        keeps: what it sends back of an answer's items; None: it goes on from stored responses.
    """

    def __init__(self, family: Family, keeps: Callable[[Item], Item] | None) -> None:
        folder = Path(__file__).parents[2] / "common" / "chat_templates"
        source = (folder / f"{family.template}.jinja").read_text(encoding="utf-8")
        self.ids = {text: 1000 + index for index, text in enumerate(family.tokens.split())}
        template = ChatTemplate(family.template, source, {"bos_token": "<s>", "eos_token": "</s>"})
        tokens = [ControlToken(text, token_id, special=True) for text, token_id in self.ids.items()]
        self._writer = writer(template, tokens, has_checkpoints=True)
        self._keeps = keeps
        self._store = ResponseStore(1)
        self._input: list[Item] = [{"role": "user", "content": "Look around."}]
        self._previous: str | None = None
        self.sent: list[RenderedPrompt] = []
        self.broken: PrefixBreak | None = None

    def turn(self, raw: str, follow: str) -> None:
        """The model writes something, and gets a result of its call or the next question."""
        request = ResponsesRequest.model_validate({
            "input": self._input, "tools": [LS], "include": ["reasoning.encrypted_content"],
        })  # fmt: skip
        previous = None if self._previous is None else self._store.previous(self._previous, "me")
        history = [] if previous is None else previous.conversation()
        chat = ChatRequest(request, history, request.input)
        turn = ChatTurn(chat.body, self._writer)
        self.sent.append(turn.prompt.rendered)
        self.broken = turn.prompt.broken
        begun = new_response(request, chat.body, chat.tools, model="m", store=True)
        codec = ResponseCodec(begun, turn.reading(), Output(begun.id, chat.tools, sealed=True), lambda response: None)
        response = asyncio.run(codec.collect(self._happening(raw)))
        output = [item.model_dump() for item in response.output]
        call = output[-1] if output[-1]["type"] == "function_call" else None
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": follow} if call else None
        following = [result or {"role": "user", "content": follow}]
        if self._keeps is None:
            assert self._store.put("me", response, request.input, previous) is not None
            self._previous, self._input = response.id, following
        else:
            self._input += [*map(self._keeps, output), *following]

    async def _happening(self, raw: str) -> AsyncIterator[tuple[int, Event | Queued]]:
        ids: Sequence[int] = [self.ids[text] for text in self.ids for _ in range(raw.count(text))]
        yield 0, Queued(1)
        yield 0, TextDelta(raw, list(ids))
        usage = Usage(prompt_tokens=1, completion_tokens=len(ids))
        yield 0, Finish(reason="stop", eos_reason="stop_token", usage=usage)


def as_it_came(item: Item) -> Item:
    return item


def as_codex_keeps_it(item: Item) -> Item:
    """Without ids, and of thoughts what is sealed."""
    return {name: value for name, value in item.items() if name not in ("id", "status")} | (
        {"content": None} if item["type"] == "reasoning" else {}
    )


@pytest.mark.parametrize("keeps", [None, as_it_came, as_codex_keeps_it])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_a_loop_of_tools(family: Family, keeps: Callable[[Item], Item] | None) -> None:
    answers = family.loop_of_tools()
    agent = Agent(family, keeps)
    for raw, follow in zip(answers, ["x y", "z", "Thanks."], strict=True):
        agent.turn(raw, follow)
        assert agent.broken is None
    for number, raw in enumerate(answers[:2]):
        assert agent.sent[number + 1].text.startswith(agent.sent[number].text + raw)
    agent.turn(family.thinking("Bye.") + family.text + "Bye.", "?")
    if not family.forgets:
        assert agent.sent[3].text.startswith(agent.sent[2].text + answers[2])
