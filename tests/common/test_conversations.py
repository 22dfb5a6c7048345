"""Which shape a conversation gets: the least changed one that the template takes."""

from __future__ import annotations

import pytest

from common.conversations import Message, Tool, calls_as_text, other_shapes, with_parts, with_tools_text
from common.parsing.formats.base import ToolFormat
from common.parsing.formats.registry import FORMATS, default_format, format_named
from common.templating import ChatTemplate

# Each refuses one thing; a template here is made of some of them.
REFUSES = "{% if CONDITION %}{{ raise_exception('!') }}{% endif %}"
ONE_SYSTEM = REFUSES.replace("CONDITION", "m.role == 'system' and loop.previtem and loop.previtem.role == 'system'")
SYSTEM_FIRST = REFUSES.replace("CONDITION", "m.role == 'system' and loop.previtem and loop.previtem.role != 'system'")
NO_SYSTEM = REFUSES.replace("CONDITION", "m.role == 'system'")
TURNS = REFUSES.replace("CONDITION", "loop.previtem and m.role == loop.previtem.role and m.role != 'system'")
USER_FIRST = REFUSES.replace("CONDITION", "loop.first and m.role == 'assistant'")
NO_TOOLS = REFUSES.replace("CONDITION", "m.role == 'tool'")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def template(*refusals: str) -> ChatTemplate:
    body = "{{ m.role[0] }}({{ m.content | replace('\n\n', '+') }})"
    calls = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    return ChatTemplate("t", "{% for m in messages %}" + "".join(refusals) + body + calls + "{% endfor %}")


def conversation(roles: str) -> list[Message]:
    return [{"role": ROLES[role], "content": str(index)} for index, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("refusals", "roles", "shown"),
    [
        ([], "ssuusau", "s(0)s(1)u(2)u(3)s(4)a(5)u(6)"),
        ([ONE_SYSTEM], "ssuus", "s(0+1)u(2)u(3)s(4)"),
        ([SYSTEM_FIRST], "ssuus", "s(0)s(1)u(2)u(3)u(4)"),
        ([TURNS], "ssuusaa", "s(0)s(1)u(2+3)s(4)a(5+6)"),
        ([ONE_SYSTEM, SYSTEM_FIRST], "ssuus", "s(0+1)u(2)u(3)u(4)"),
        ([ONE_SYSTEM, TURNS], "ssuus", "s(0+1)u(2+3)s(4)"),
        ([SYSTEM_FIRST, TURNS], "ssuus", "s(0)s(1)u(2+3+4)"),
        ([ONE_SYSTEM, SYSTEM_FIRST, TURNS], "ssuusa", "s(0+1)u(2+3+4)a(5)"),
        ([NO_SYSTEM], "suusu", "u(0+1)u(2)u(3+4)"),
        ([NO_SYSTEM], "sau", "u(0)a(1)u(2)"),
        ([NO_SYSTEM], "s", "u(0)"),
        ([NO_SYSTEM, TURNS], "suusua", "u(0+1+2+3+4)a(5)"),
        ([USER_FIRST], "au", "u()a(0)u(1)"),
        ([USER_FIRST, NO_SYSTEM], "aus", "u()a(0)u(1+2)"),
        ([NO_TOOLS], "ssuut", "s(0)s(1)u(2)u(3)u(4)"),
        ([NO_TOOLS], "suutu", "s(0)u(1)u(2)u(3)u(4)"),
        ([NO_TOOLS, TURNS], "suutsu", "s(0)u(1+2+3)s(4)u(5)"),
        ([NO_TOOLS, NO_SYSTEM], "sut", "u(0+1)u(2)"),
    ],
)
def test_the_least_changed_shape_is_taken(refusals: list[str], roles: str, shown: str) -> None:
    assert template(*refusals).render(conversation(roles)).text == shown


def test_messages_with_calls_are_not_joined() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [*conversation("uu"), {"role": "assistant", "content": "2", "tool_calls": [call]}]
    shown = 'a(2){"name": "f", "arguments": {}}'  # as the template writes it
    assert template(TURNS).render(messages).text == "u(0+1)" + shown
    doubled = [*messages, messages[-1]]
    shapes = [
        shape.messages for shape in other_shapes(doubled, [], default_format()) if "tools" not in shape.description
    ]
    assert all(shape[-2:] == doubled[-2:] for shape in shapes)


def test_contents_of_parts_are_joined_with_a_blank_line_between() -> None:
    [shape, *_] = other_shapes(with_parts(conversation("ssu")), [], default_format())
    parts = [{"type": "text", "text": text} for text in ("0", "\n\n", "1")]
    assert shape.messages[0] == {"role": "system", "content": parts}


def test_no_shape_is_tried_twice() -> None:
    messages = conversation("ssuusaa")
    shapes = [shape.messages for shape in other_shapes(messages, [], default_format())]
    assert messages not in shapes
    assert all(shape not in shapes[:index] for index, shape in enumerate(shapes))
    assert not list(other_shapes(conversation("ua"), [], default_format()))


# --- tools as text --------------------------------------------------------------------------------------------------


def calling(*arguments: object, content: str | None = "Let me see.") -> Message:
    calls = [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": given}} for given in arguments]
    return {"role": "assistant", "content": content, "tool_calls": calls, "name": "Bo"}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"path": "é", "n": 1.0}, '{"path": "é", "n": 1.0}'),
        ('{"path":"\\u00e9",  "n":1.0}', '{"path":"\\u00e9",  "n":1.0}'),  # as the model once wrote it
        ({}, "{}"),
        ('{"path": "/s', '{"arguments": "{\\"path\\": \\"/s"}'),
        ('{"path": NaN}', '{"arguments": "{\\"path\\": NaN}"}'),
        ("[1]", '{"arguments": "[1]"}'),
    ],
)
def test_calls_as_text(given: object, written: str) -> None:
    [message] = calls_as_text([calling(given)], default_format())
    text = f'Let me see.\n\n<tool_call>\n{{"name": "ls", "arguments": {written}}}\n</tool_call>'
    assert message == {"role": "assistant", "content": text, "name": "Bo"}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_calls_as_text_in_every_form(format: ToolFormat) -> None:
    [message] = calls_as_text([calling({"path": "/srv"}, {"path": "/tmp"}, content=None)], format)
    assert [message["content"].count(text) for text in ("/srv", "/tmp")] == [1, 1]
    assert message["content"].count("ls") >= 2


def test_calls_as_text_keep_the_form_of_the_content() -> None:
    [message] = calls_as_text(with_parts([calling({})]), default_format())
    assert [part["text"] for part in message["content"]][:2] == ["Let me see.", "\n\n"]
    [untouched] = calls_as_text(conversation("a"), default_format())
    assert untouched == conversation("a")[0]


TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": "ls", "description": "é", "strict": True}},
    {"type": "function", "function": {"name": "rm", "parameters": {}}},
]


def test_tools_in_a_system_message() -> None:
    [system, *others] = with_tools_text(conversation("uau"), TOOLS, default_format())
    assert others == conversation("uau")
    assert system["role"] == "system"
    lines = system["content"].splitlines()
    assert lines[2] == '{"type": "function", "function": {"name": "ls", "description": "é", "strict": true}}'
    assert lines[3] == '{"type": "function", "function": {"name": "rm", "parameters": {}}}'
    assert '<tool_call>\n{"name": "FUNCTION_NAME", "arguments": {"PARAMETER_NAME": "VALUE"}}' in system["content"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_stand_before_the_system_prompt(role: str) -> None:
    alone = with_tools_text(conversation("u"), TOOLS, default_format())
    [system, user] = with_tools_text(
        [{"role": role, "content": "Be kind."}, *conversation("u")], TOOLS, default_format()
    )
    assert system == {"role": role, "content": alone[0]["content"] + "\n\nBe kind."}
    assert user == conversation("u")[0]


def test_tools_are_described_in_the_form_of_the_model() -> None:
    format = format_named("mistral")
    assert format is not None
    [system, _] = with_tools_text(conversation("u"), TOOLS, format)
    assert '[TOOL_CALLS]FUNCTION_NAME[ARGS]{"PARAMETER_NAME": "VALUE"}' in system["content"]
