"""Which shape a conversation gets: the least changed one that the template takes."""

from __future__ import annotations

import pytest

from common.conversations import Message, other_shapes, with_parts
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
    shown = 'a(2){"name": "f", "arguments": {}}'
    assert template(TURNS).render(messages).text == "u(0+1)" + shown
    doubled = [*messages, messages[-1]]
    shapes = [shape.messages for shape in other_shapes(doubled, []) if "tools" not in shape.description]
    assert all(shape[-2:] == doubled[-2:] for shape in shapes)


def test_contents_of_parts_are_joined_with_a_blank_line_between() -> None:
    [shape, *_] = other_shapes(with_parts(conversation("ssu")), [])
    parts = [{"type": "text", "text": text} for text in ("0", "\n\n", "1")]
    assert shape.messages[0] == {"role": "system", "content": parts}


def test_no_shape_is_tried_twice() -> None:
    messages = conversation("ssuusaa")
    shapes = [shape.messages for shape in other_shapes(messages, [])]
    assert messages not in shapes
    assert all(shape not in shapes[:index] for index, shape in enumerate(shapes))
    assert not list(other_shapes(conversation("ua"), []))
