"""Every shape of message that a client may send, as templates get to see it, or as the client is told what is wrong."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from common.errors import InvalidRequest, Unsupported
from common.templating import ChatTemplate
from endpoints.OAI.types.message import ChatMessage
from tests.endpoints.OAI.writing import writer
from tests.endpoints.running import RunningServer

SHOWN = ChatTemplate("shown", "{{ messages | tojson }}")
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001"
        "f61738550000000049454e44ae426082"
    )
).decode()
IMAGE = f"data:image/png;base64,{PIXEL}"
CONVERSATION = TypeAdapter(list[ChatMessage])


def seen(*messages: object, template: ChatTemplate = SHOWN) -> Any:
    """The messages as the template sees them."""
    return json.loads(writer(template).conversation(CONVERSATION.validate_python(messages), {}).text)


def called(arguments: object) -> dict[str, Any]:
    call = {"id": "c1", "function": {"name": "ls", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def post(server: RunningServer, body: str) -> httpx.Response:
    return server.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})


# --- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"text": "a"}, "b", {"type": "input_text", "text": "c"}, {"type": "output_text", "text": "d"}], "abcd"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        ([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "x"),
    ],
)
def test_content_is_one_text(content: object, text: str) -> None:
    assert seen({"role": "user", "content": content}) == [{"role": "user", "content": text}]


def test_null_is_as_absent() -> None:
    nothing = dict.fromkeys(("content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"))
    assert seen({"role": "assistant"} | nothing) == [{"role": "assistant", "content": ""}]
    assert seen({"role": None, "content": "x"}) == [{"role": "user", "content": "x"}]


def test_a_refusal_stands_for_a_missing_content() -> None:
    assert seen({"role": "assistant", "content": None, "refusal": "No."})[0]["content"] == "No."


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_under_any_name(name: str) -> None:
    assert seen({"role": "assistant", "content": "x", name: "hm"}) == [
        {"thinking": "hm", "role": "assistant", "content": "x", "reasoning_content": "hm"}
    ]


def test_names_and_unknown_members_are_kept() -> None:
    message = {"role": "critic", "content": "x", "name": "Bo", "prefix": True, "tool_plan": "a"}
    assert seen(message) == [message]


@pytest.mark.parametrize(
    ("part", "capability"),
    [
        ({"type": "image_url", "image_url": {"url": IMAGE, "detail": "high"}}, "vision"),
        ({"type": "image_url", "image_url": IMAGE}, "vision"),
        ({"type": "input_image", "image_url": IMAGE}, "vision"),
        ({"type": "image"}, "vision"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio input"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video input"),
        ({"type": "file", "file": {"file_id": "x"}}, "file input"),
    ],
)
def test_what_a_text_model_cannot_take_is_refused(part: dict[str, Any], capability: str) -> None:
    with pytest.raises(Unsupported, match=f"{capability} is not available") as caught:
        seen({"role": "user", "content": ["what?", part]})
    assert caught.value.param == "messages.0.content.1"


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        ({"type": "text"}, "text", "text is missing"),
        ({"type": "text", "text": None}, "text", "text is missing"),
        ({"type": "refusal", "text": "x"}, "refusal", "refusal is missing"),
        ({"type": "hologram"}, "type", "unknown type 'hologram'"),
    ],
)
def test_what_is_wrong_with_a_part_is_named(part: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        seen({"role": "user", "content": "x"}, {"role": "user", "content": [part]})
    assert caught.value.param == f"messages.1.content.0.{param}"


@pytest.mark.parametrize(
    "message",
    [
        5,
        {"role": 5, "content": "x"},
        {"role": "", "content": "x"},
        {"content": 5},
        {"content": {"text": "x"}},
        {"content": [5]},
        {"content": [{"type": 5}]},
        {"content": [{"type": "image_url", "image_url": {}}]},
        {"content": "x", "name": ["Bo"]},
        {"content": "x", "tool_calls": "ls"},
        {"content": "x", "tool_calls": [{"function": {}}]},
    ],
)
def test_what_is_no_message_is_a_400(server: RunningServer, message: object) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": [{"content": "x"}, message]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("messages.1")


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user"}, 5])
def test_no_list_of_messages_is_a_400(server: RunningServer, messages: object) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("depth", [100, 700, 2_000, 100_000])
@pytest.mark.parametrize(
    "around",
    [
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":DEEP}}]}]}',
        '{"messages":[{"content":"x","extra":DEEP}]}',
        '{"messages":[{"content":"x"}],"tools":[{"function":{"name":"f","parameters":DEEP}}]}',
        '{"messages":[{"content":"x"}],"chat_template_kwargs":{"x":DEEP}}',
    ],
)
def test_deep_nesting_is_no_failure(server: RunningServer, around: str, depth: int) -> None:
    response = post(server, around.replace("DEEP", '{"a":' * depth + "1" + "}" * depth))
    assert response.status_code in {100: [200], 700: [200, 400]}.get(depth, [400]), response.text


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(
    "body",
    [
        r'{"messages":[{"content":"cut \ud83d"}]',
        r'{"messages":[{"content":"x","role":"\udc00"}]',
        r'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":\"\\ud83d\"}"}}]}]',
        r'{"messages":[{"content":"x"}],"tools":[{"function":{"name":"\ud83d"}}],"response_prefix":"\ud83d"',
    ],
)
def test_half_a_surrogate_pair_is_no_failure(server: RunningServer, body: str, stream: str) -> None:
    response = post(server, f'{body},"stream":{stream}}}')
    assert response.status_code == 200, response.text
    assert "Hello" in response.text


JSON: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 5, 1e300, "", "a", "{", '"\ud83d"', [], ["a"], [{}], {}, {"type": "text"}, {"a": [None]}]
)
MEMBERS = {
    "role": st.sampled_from(["user", "assistant", "tool", "function", "developer", "x"]) | JSON,
    "content": st.lists(st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON, "image_url": JSON}), max_size=2)
    | JSON,
    "tool_calls": st.lists(
        st.fixed_dictionaries(
            {"function": st.fixed_dictionaries({"name": st.just("f") | JSON}, optional={"arguments": JSON})},
            optional={"id": JSON, "type": JSON},
        ),
        max_size=2,
    )
    | JSON,
    "tool_call_id": st.sampled_from(["a", "b"]) | JSON,
    "function_call": JSON,
    "reasoning_content": JSON,
}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=MEMBERS), max_size=3))
def test_no_conversation_is_a_failure_of_ours(messages: list[dict[str, Any]]) -> None:
    with suppress(ValidationError, InvalidRequest):  # told to the client as 400
        seen(*messages)


# --- calls of tools and their results -------------------------------------------------------------------------------

ITEMS = ChatTemplate(
    "items",
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}.{% endfor %}{% endfor %}",
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"path":"/srv/é","n":1.0}', 'path="/srv/é";n=1.0;.'),
        ({"path": "/srv/é", "n": 1.0}, 'path="/srv/é";n=1.0;.'),
        ('{"a": [1, {"b": null}], "big": 12345678901234567890}', 'a=[1, {"b": null}];big=12345678901234567890;.'),
        (None, "."),
        ("", "."),
        ("null", "."),
        ("{}", "."),
        ('{"path": "/s', r'arguments="{\"path\": \"/s";.'),
        ('""', r'arguments="\"\"";.'),
        ("[1]", 'arguments="[1]";.'),
        ([1, "é"], r'arguments="[1, \"é\"]";.'),
        (5, 'arguments="5";.'),
        ('{"a": NaN}', r'arguments="{\"a\": NaN}";.'),
        ('{"a": 1e999}', r'arguments="{\"a\": 1e999}";.'),
    ],
)
def test_arguments_are_a_mapping_for_templates_that_walk_through_them(arguments: object, text: str) -> None:
    messages = CONVERSATION.validate_python([called(arguments)])
    assert writer(ITEMS).conversation(messages, {}).text == text


def test_broken_arguments_too_deep_to_read() -> None:
    deep = '{"a":' * 100_000
    messages = CONVERSATION.validate_python([called(deep)])
    assert deep[:100] in writer(ITEMS).conversation(messages, {}).text.replace('\\"', '"')


@pytest.mark.parametrize("arguments", ['{"path": "/s', '""', "[1]"])
def test_broken_arguments_stay_where_the_template_takes_them(arguments: str) -> None:
    assert seen(called(arguments))[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a":1.0, "b" : "é"}', '{"a":1.0, "b" : "é"}'), ({"a": 1.0}, '{"a": 1.0}'), (None, "{}"), ('{"a', '{"a')],
)
def test_arguments_stay_text_for_templates_that_write_it(arguments: object, text: str) -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments + '' }}"
    source += "{% endfor %}{% endfor %}"
    messages = CONVERSATION.validate_python([called(arguments)])
    assert writer(source).conversation(messages, {}).text == text


def test_calls_are_complete() -> None:
    calls = [
        {"function": {"name": "a"}, "index": 0},
        {"id": "", "function": {"arguments": "{}", "name": "b", "x": 1}},
        {"id": "mine", "type": "custom", "custom": {"name": "c", "input": "text"}},
    ]
    assert seen({"role": "assistant", "content": None, "tool_calls": calls}) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call00001", "type": "function", "function": {"name": "a", "arguments": {}}, "index": 0},
                {"id": "call00002", "type": "function", "function": {"name": "b", "arguments": {}, "x": 1}},
                {"id": "mine", "type": "function", "function": {"name": "c", "arguments": {"input": "text"}}},
            ],
        }
    ]


def test_a_call_of_nothing() -> None:
    with pytest.raises(InvalidRequest, match="function is missing") as caught:
        seen({"role": "assistant", "tool_calls": [{"id": "x"}]})
    assert caught.value.param == "messages.0.tool_calls.0.function"


def test_functions_of_old() -> None:
    shown = seen(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "ok"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "function", "name": "g", "content": "ok"},
    )
    assert shown[1]["tool_calls"] == [
        {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert shown[2] == {"role": "tool", "content": "ok", "name": "f", "tool_call_id": "call00001"}
    assert shown[4]["tool_call_id"] == shown[3]["tool_calls"][0]["id"] == "call00002"


def results(*ids: str | None, names: list[str | None] | None = None) -> list[dict[str, Any]]:
    shown = seen(
        {"role": "assistant", "tool_calls": [{"id": call, "function": {"name": f"f{call}"}} for call in "abc"]},
        *(
            {"role": "tool", "tool_call_id": call, "content": str(index), "name": name}
            for index, (call, name) in enumerate(zip(ids, names or [None] * len(ids), strict=True))
        ),
        {"role": "user", "content": "x"},
    )
    assert shown[0]["role"] == "assistant"
    assert shown[-1]["role"] == "user"
    tools: list[dict[str, Any]] = shown[1:-1]
    return tools


@pytest.mark.parametrize(
    ("ids", "order"),
    [
        (["a", "b", "c"], "012"),
        (["c", "a", "b"], "120"),
        (["x", "c", "a", "y"], "2103"),
        (["b", "b", "a"], "201"),
        (["b"], "0"),
        ([], ""),
    ],
)
def test_results_stand_in_the_order_of_the_calls(ids: list[str], order: str) -> None:
    assert "".join(result["content"] for result in results(*ids)) == order


def test_results_without_an_id_are_those_of_the_open_calls() -> None:
    assert [result["tool_call_id"] for result in results(None, None, None)] == ["a", "b", "c"]
    assert [result["tool_call_id"] for result in results("b", None, None)] == ["a", "b", "c"]
    named = results(None, None, None, names=["fc", "fa", None])
    assert [(result["tool_call_id"], result["content"]) for result in named] == [("a", "1"), ("b", "2"), ("c", "0")]
    assert len({result["tool_call_id"] for result in results(None, None, None, None)}) == 4


def test_ids_that_the_template_would_refuse() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{% endfor %}"
        "{{ '=' ~ m.tool_call_id if m.role == 'tool' }} {% endfor %}"
    )
    messages = [
        {
            "role": "assistant",
            "tool_calls": [{"id": id, "function": {"name": "f"}} for id in ("call_long", "AbCdEfGh9")],
        },
        {"role": "tool", "tool_call_id": "call_long", "content": "x"},
        {"role": "tool", "tool_call_id": "AbCdEfGh9", "content": "x"},
    ]
    made, first, second, _ = writer(source).conversation(CONVERSATION.validate_python(messages), {}).text.split(" ")
    assert made == f"{first[1:]}{{}}AbCdEfGh9{{}}"
    assert first[1:].isalnum()
    assert second == "=AbCdEfGh9"


def test_a_call_beside_a_content_of_none() -> None:
    source = "{% for m in messages %}{{ m.content if m.content is not none else m.tool_calls | tojson }}{% endfor %}"
    assert '"name": "ls"' in writer(source).conversation(CONVERSATION.validate_python([called("{}")]), {}).text
    both = called("{}") | {"content": "Let me look."}
    text = writer(source).conversation(CONVERSATION.validate_python([both]), {}).text
    assert text.startswith("Let me look.")
    assert '"name": "ls"' in text
