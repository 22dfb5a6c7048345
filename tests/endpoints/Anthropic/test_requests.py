"""Bodies of Anthropic's API become chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from common.config_models import ModelParameters
from common.errors import InvalidRequest, Unsupported
from endpoints.Anthropic.types.request import CountTokensRequest, MessagesRequest
from endpoints.Anthropic.utils.ids import own_id, told_id
from endpoints.Anthropic.utils.requests import Translated, as_chat

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HI = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aWk="}}
LS = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}}


def text(text: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def use(id: str = "toolu_1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "ls", "input": given}


def result(id: str = "toolu_1", /, **others: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **others}


def translated(*messages: dict[str, Any], settings: dict[str, Any] | None = None, **fields: Any) -> Translated:
    body = MessagesRequest.model_validate({"messages": list(messages) or [HI], **fields})
    return as_chat(body, ModelParameters.model_validate(settings or {}))


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """As a chat completion would be sent them, with their contents as lists of texts."""
    shown = []
    for message in translated(*messages, **fields).chat.messages:
        members = message.model_dump(exclude_none=True)
        members["content"] = [part.text for part in message.content or ()]
        shown.append(members)
    return shown


# --- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be kind.", [text("Be kind.")]])
@pytest.mark.parametrize("content", ["hi", [text("hi", citations=None)]])
def test_texts_and_blocks_are_the_same(system: object, content: object) -> None:
    assert messages_of({"role": "user", "content": content}, system=system) == [
        {"role": "system", "content": ["Be kind."]},
        {"role": "user", "content": ["hi"]},
    ]


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["a", "b"], "a\n\nb"),
        (["a\n", "b"], "a\nb"),
        (["a", "\nb"], "a\nb"),
        (["", "b"], "b"),
        (["a", "", "b"], "a\n\nb"),
    ],
)
def test_blocks_of_text_are_texts_of_their_own(texts: list[str], joined: str) -> None:
    [message] = messages_of({"role": "user", "content": [text(item) for item in texts]})
    assert "".join(message["content"]) == joined


def test_an_answer_comes_back_as_it_was() -> None:
    answer = [
        {"type": "thinking", "thinking": "Where?", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("I look"),
        text(" there."),
        use("toolu_1", path="/a"),
        use("toolu_id_ZnVuY3Rpb25zLmxzOjA"),
    ]
    assert messages_of(HI, {"role": "assistant", "content": answer}, HI)[1] == {
        "role": "assistant",
        "content": ["I look", " there."],
        "reasoning_content": "Where?",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/a"}}},
            {"id": "functions.ls:0", "type": "function", "function": {"name": "ls", "arguments": {}}},
        ],
    }


def test_results_stand_where_they_are() -> None:
    content = [
        result("toolu_1", content="x"),
        result("toolu_2", content=[text("y"), text("z")]),
        text("Go on."),
        result("toolu_3"),
        result("toolu_4", is_error=True),
    ]
    assert messages_of({"role": "user", "content": content}) == [
        {"role": "tool", "tool_call_id": "call_1", "content": ["x"]},
        {"role": "tool", "tool_call_id": "call_2", "content": ["y\n\n", "z"]},
        {"role": "user", "content": ["Go on."]},
        {"role": "tool", "tool_call_id": "call_3", "content": []},
        {"role": "tool", "tool_call_id": "call_4", "content": ["Error"]},
    ]


def test_a_system_message_in_the_middle_stays_there() -> None:
    assert [message["role"] for message in messages_of(HI, {"role": "system", "content": "x"}, HI)] == [
        "user", "system", "user",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "document", "source": {"type": "text", "data": "x"}, "title": "T", "context": "C"}, ["T\nC\nx"]),
        ({"type": "document", "source": {"type": "content", "content": "x"}, "title": "T"}, ["T\n\n", "x"]),
        ({"type": "search_result", "source": "s", "title": "T", "content": [text("x")]}, ["T\ns\nx"]),
        ({"type": "tool_reference", "tool_name": "ls"}, ["The tool ls can be used."]),
    ],
)
def test_blocks_that_are_shown_as_text(block: dict[str, Any], shown: list[str]) -> None:
    assert messages_of({"role": "user", "content": [block]})[0]["content"] == shown
    assert messages_of({"role": "user", "content": [result(content=[block])]})[0]["content"] == shown


def test_images_are_urls() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    content = [text("a"), IMAGE, result(content=[url])]
    shown = [message.content for message in translated({"role": "user", "content": content}).chat.messages]
    urls = [part.image_url.url for parts in shown for part in parts or () if part.image_url]
    assert urls == ["data:image/png;base64,aWk=", "https://example.com/a.png"]


@pytest.mark.parametrize(
    ("role", "block", "path"),
    [
        ("user", {"type": "video"}, "type"),
        ("user", {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}, "type"),
        ("user", use(), "type"),
        ("assistant", result(), "type"),
        ("user", {"type": "document", "source": {"type": "base64", "data": "x"}}, "source.type"),
        ("user", {"type": "document", "source": {"type": "text"}}, "source.data"),
        ("user", {"type": "image", "source": {"type": "file", "file_id": "x"}}, "source.type"),
        ("user", {"type": "image", "source": {"type": "base64"}}, "source.data"),
        ("user", {"type": "image", "source": {"type": "url"}}, "source.url"),
        ("user", result(content=[{"type": "video"}]), "content.0.type"),
        ("user", result(content=[use()]), "content.0.type"),
    ],
)
def test_blocks_that_cannot_be_shown(role: str, block: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translated(HI, {"role": role, "content": [text("a"), block]}, HI)
    assert caught.value.param == f"messages.1.content.1.{path}"
    assert "messages.1.content.1" in caught.value.message


def test_a_last_message_of_the_assistant_is_gone_on_from() -> None:
    chat = translated(HI, {"role": "assistant", "content": "Sure: "}).chat
    assert (chat.continue_final_message, chat.begins_answer) == (True, False)
    assert translated(HI).chat.begins_answer


def test_nothing_goes_on_from_a_call_but_it_can_be_counted() -> None:
    messages: list[dict[str, Any]] = [HI, {"role": "assistant", "content": [use()]}]
    with pytest.raises(InvalidRequest, match="tool_result has to follow"):
        translated(*messages)
    counted = as_chat(CountTokensRequest.model_validate({"messages": messages}), ModelParameters()).chat
    assert (counted.continue_final_message, counted.begins_answer) == (False, False)


# --- other fields -------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_left_to_presets() -> None:
    chat = translated(temperature=0.5, stop_sequences=["x", ""], max_tokens=None, min_p=0.1, top_k=None).chat
    assert chat.model_fields_set >= {"temperature", "stop", "min_p"}
    assert not chat.model_fields_set & {"max_tokens", "top_k", "top_p", "reasoning_budget_tokens", "tools"}
    assert (chat.temperature, chat.stop, chat.min_p) == (0.5, ["x"], 0.1)


def test_fields_of_anthropics_own_servers_are_ignored() -> None:
    translated(
        metadata={"user_id": "x"}, service_tier="auto", container="x", context_management={"edits": []}, speed="fast",
        betas=["x"], mcp_servers=[],
    )  # fmt: skip
    with pytest.raises(Unsupported, match="mcp_servers"):
        translated(mcp_servers=[{"url": "https://example.com"}])


@pytest.mark.parametrize(
    ("thinking", "settings", "thinks", "shown", "budget"),
    [
        (None, {}, False, "none", None),
        (None, {"template_vars_default": {"enable_thinking": True}}, None, "whole", None),
        (None, {"template_vars_default": {"enable_thinking": False}}, None, "none", None),
        (None, {"force_enable_thinking": True}, None, "whole", None),
        ({"type": "disabled"}, {"force_enable_thinking": True}, False, "none", None),
        ({"type": "enabled", "budget_tokens": 2000}, {}, True, "whole", 2000),
        ({"type": "adaptive", "display": "omitted"}, {}, True, "omitted", None),
        ({"type": "adaptive", "display": "summarized"}, {}, True, "whole", None),
    ],
)
def test_thinking(
    thinking: dict[str, Any] | None, settings: dict[str, Any], thinks: bool | None, shown: str, budget: int | None
) -> None:
    asked = translated(thinking=thinking, settings=settings)
    assert (asked.chat.thinks, asked.thoughts, asked.chat.reasoning_budget) == (thinks, shown, budget)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "ls"}, {"type": "function", "function": {"name": "ls"}}, True),
    ],
)
def test_tool_choice(choice: dict[str, Any] | None, expected: object, parallel: bool) -> None:
    chat = translated(tools=[LS], tool_choice=choice).chat.model_dump()
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (expected, parallel)


def test_tools_are_described_as_functions() -> None:
    strict = {"type": "custom", "name": "get", "strict": True, "input_examples": [{"a": 1}], "defer_loading": True}
    asked = translated(tools=[{**LS, **MARK}, strict]).chat
    assert [tool.given for tool in asked.tools or ()] == [
        {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "get", "strict": True, "input_examples": [{"a": 1}]}},
    ]


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124"])
def test_tools_of_anthropics_own_are_refused(kind: str) -> None:
    with pytest.raises(Unsupported, match=kind) as caught:
        translated(tools=[LS, {"type": kind, "name": "x"}])
    assert caught.value.param == "tools.1.type"


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_format_of_the_answer(where: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    asked = translated(**{where: {"format": wanted, "effort": "low"} if where == "output_config" else wanted})
    assert asked.chat.response_format.json_schema == {"schema": {"type": "object"}}
    path = "output_config.format" if where == "output_config" else "output_format"
    assert asked.paths.origin("response_format.json_schema.schema") == f"{path}.schema"
    assert asked.chat.effort == ("low" if where == "output_config" else None)


@pytest.mark.parametrize(
    ("fields", "messages", "path"),
    [
        ({}, [{"role": "user", "content": [IMAGE] * 33}], "messages"),
        ({}, [{"role": "user", "content": [text("x", **MARK)] * 501}], "messages.0.content.0"),
        ({"stop_sequences": ["a"] * 200, "stop": ["b"] * 100}, [HI], "stop_sequences"),
    ],
)
def test_too_much_together(fields: dict[str, Any], messages: list[dict[str, Any]], path: str) -> None:
    with pytest.raises(InvalidRequest, match="at most|fewer") as caught:
        translated(*messages, **fields)
    assert caught.value.param == path


# --- marks --------------------------------------------------------------------------------------------------------


def marked_texts(*messages: dict[str, Any], **fields: Any) -> list[tuple[int, str]]:
    """The index of the message that each mark is in, and the text before the mark in it."""
    found = []
    for index, message in enumerate(translated(*messages, **fields).chat.messages):
        before = ""
        for part in message.content or ():
            before += part.text or ""
            if part.cache_control is not None:
                found.append((index, before))
    return found


def test_marks_are_those_of_a_chat_completion() -> None:
    content = [
        result(content="x", **MARK),
        result(content=[text("y", **MARK), text("z")]),
        result(**MARK),
        text("a", **MARK),
        text("b"),
    ]
    answer = [{"type": "thinking", "thinking": "hm"}, text("c"), use() | MARK]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": answer},
        HI,
    ]
    assert marked_texts(*messages, system=[text("s", **MARK), text("t")]) == [
        (0, "s\n\n"), (1, "x"), (2, "y\n\n"), (3, ""), (4, "a\n\n"), (5, "c"),
    ]  # fmt: skip
    assert marked_texts(HI, **MARK, tools=[{**LS, **MARK}]) == []  # the template's and the server's own places


# --- paths and ids ------------------------------------------------------------------------------------------------


def test_errors_name_what_was_sent() -> None:
    paths = translated({"role": "user", "content": [text("a"), result(content=[text("b"), IMAGE])]}, system="s").paths
    assert paths.origin("messages.2.content.1.image_url") == "messages.0.content.1.content.1.source"
    assert paths.origin("messages.1.name") == "messages.0.name"
    assert paths.origin("messages.0.content.0.text") == "system.0.text"
    assert paths.origin("tools.3.function.parameters.x") == "tools.3.function.parameters.x"
    with pytest.raises(Unsupported) as caught, paths.as_sent():
        raise Unsupported("messages.2.content.1 is an image.", param="messages.2.content.1")
    assert caught.value.message == "messages.0.content.1.content.1 is an image."


@pytest.mark.parametrize("own", ["call_0123456789abcdef01234567", "functions.ls:0", "abc123def", "call_é", "call_", ""])
def test_ids_come_back_as_they_were(own: str) -> None:
    told = told_id(own)
    assert told.startswith("toolu_")
    assert set(told) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert own_id(told) == own


@pytest.mark.parametrize("given", ["call_1", "x", "toolu_id_!", "toolu_id_/w", "toolu_a-b", "toolu_id_gA"])
def test_ids_of_other_servers_stay(given: str) -> None:
    assert own_id(given) == given
