"""Conversations that a chat template refuses or cuts, in shapes that it takes.

OpenAI's API allows what many templates do not know: system messages anywhere, several messages of one role in a row,
tools at all, or tools without a description. The shapes here say the same in fewer kinds of messages. Every message
keeps its place, and what a shape makes of a message does not depend on what follows, except for what is joined to it:
so the prompt of a longer conversation begins as that of a shorter one, as far as the template allows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, takewhile
from typing import Any, Final, NamedTuple, TypeAlias

from common.parsing.formats.base import Call, ToolFormat
from common.parsing.json_text import refuse_constant

Message: TypeAlias = dict[str, Any]  # as a template sees it: role, content and the rest
Tool: TypeAlias = dict[str, Any]  # as the client described it

SYSTEM_ROLES: Final = ("system", "developer")

_SEPARATOR = "\n\n"
_TOOLS_TEXT: Final = """\
You can call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments exactly in this form, once for each call:
{example}
You get the results in the next message. Where no function helps, answer without calling any."""
_EXAMPLE: Final = Call("FUNCTION_NAME", '{"PARAMETER_NAME": "VALUE"}')


class Place(NamedTuple):
    """A place in a conversation.

    Attributes:
        message: its index.
        characters: of its content before the place. 0: the message begins there, with its thought where it has one.
    """

    message: int
    characters: int = 0


class _Step(NamedTuple):
    change: Callable[[list[Message]], list[Message]]
    description: str


class Shape(NamedTuple):
    messages: list[Message]
    tools: Sequence[Tool] | None
    description: str  # completes "the template takes the conversation with ..."


def other_shapes(messages: Sequence[Message], tools: Sequence[Tool] | None, form: ToolFormat) -> Iterator[Shape]:
    """Shapes of a conversation other than its own, the least changed first.

    Args:
        form: of calls that become text.
    """
    tried = [list(messages)]
    for steps in _ladder(form):
        shaped = list(messages)
        for step in steps:
            shaped = step.change(shaped)
        if shaped not in tried:
            tried.append(shaped)
            yield Shape(shaped, tools, ", ".join(step.description for step in steps))
    if tools is None:  # the template may be made for requests with tools only
        yield Shape(tried[0], [], "an empty list of tools")
    elif (complete := [_complete(tool) for tool in tools]) != list(tools):
        yield Shape(tried[0], complete, "tools completed")
        for shape in other_shapes(messages, complete, form):
            yield shape._replace(description=f"tools completed, {shape.description}")


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """A conversation whose contents are lists of parts."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def with_tools_text(messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat) -> list[Message]:
    """A conversation whose first system message begins with a description of tools and of how to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = {"role": "system", "content": _TOOLS_TEXT.format(tools=lines, example=form.write([_EXAMPLE]))}
    if messages and _is_system(messages[0]):
        return [_joined([text, messages[0]]), *messages[1:]]
    return [text, *messages]


# --- steps --------------------------------------------------------------------------------------------------------


def join_system(messages: list[Message]) -> list[Message]:
    """One system message where several begin a conversation."""
    first = list(takewhile(_is_system, messages))
    return [_joined(first), *messages[len(first) :]] if len(first) > 1 else messages


def later_system_as_user(messages: list[Message]) -> list[Message]:
    begun = False
    shaped = []
    for message in messages:
        begun = begun or not _is_system(message)
        shaped.append(_as_user(message) if begun and _is_system(message) else message)
    return shaped


def system_as_user(messages: list[Message]) -> list[Message]:
    """No system message at all: one before a user's becomes its beginning, any other a user's message."""
    shaped: list[Message] = []
    pending: list[Message] = []
    for message in messages:
        if _is_system(message):
            pending.append(_as_user(message))
        elif message["role"] == "user" and pending:
            shaped.append(_joined([*pending, message]))
            pending = []
        else:
            shaped += [*pending, message]
            pending = []
    return [*shaped, *pending]


def _alternate(messages: list[Message]) -> list[Message]:
    """User and assistant in turns, the user first. Calls of tools and their results stand as they are."""
    turns: list[list[Message]] = []  # joined at the end, since there may be thousands in a row
    begun = False
    for message in messages:
        if message["role"] == "assistant" and not begun:
            turns.append([{"role": "user", "content": ""}])
        begun = begun or not _is_system(message)
        if turns and _may_join(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) if len(turn) > 1 else turn[0] for turn in turns]


def calls_as_text(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Calls of tools as text of the assistant's."""
    return [_without_calls(message, form) for message in messages]


def text_before_calls(messages: Sequence[Message]) -> list[Message]:
    """An assistant's text in a message of its own before that with its calls, whose content is null."""
    shaped: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            shaped.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": None, "tool_calls": message["tool_calls"]}
        shaped.append(message)
    return shaped


def _tools_as_text(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """The same, with the results as text of the user's."""
    return [_as_user(message) if message["role"] == "tool" else message for message in calls_as_text(messages, form)]


def _ladder(form: ToolFormat) -> Iterator[tuple[_Step, ...]]:
    """Combinations of steps, those that change less first. A later one never undoes what an earlier one would do."""
    in_place = (_JOIN_SYSTEM, _LATER_SYSTEM_AS_USER, _ALTERNATE)
    tools_as_text = _Step(partial(_tools_as_text, form=form), "calls of tools as text")
    orders = [steps for count in (1, 2, 3) for steps in combinations(in_place, count)]
    orders += [(_SYSTEM_AS_USER,), (_SYSTEM_AS_USER, _ALTERNATE)]
    yield from orders
    yield (tools_as_text,)
    yield from ((tools_as_text, *steps) for steps in orders)


_JOIN_SYSTEM = _Step(join_system, "its first system messages joined")
_LATER_SYSTEM_AS_USER = _Step(later_system_as_user, "later system messages as the user's")
_SYSTEM_AS_USER = _Step(system_as_user, "system messages as the user's")
_ALTERNATE = _Step(_alternate, "neighbours of one role joined")


# --- messages and tools -------------------------------------------------------------------------------------------


def _is_system(message: Message) -> bool:
    return message["role"] in SYSTEM_ROLES


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"}


def _may_join(first: Message, second: Message) -> bool:
    return (
        first["role"] == second["role"]
        and first["role"] in ("user", "assistant")
        and not first.get("tool_calls")
        and not second.get("tool_calls")
    )


def _joined(messages: Sequence[Message]) -> Message:
    """One message with all contents, and whatever else the last one has."""
    joined: Message = {}
    for message in messages:
        joined |= message
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        joined["content"] = _SEPARATOR.join(contents)
    else:
        separated = [part for content in contents for part in (*_parts(_SEPARATOR), *_parts(content))]
        joined["content"] = separated[1:]
    return joined


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _without_calls(message: Message, form: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = form.write([_call(call) for call in calls])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return _joined([rest, {"content": text}])


def _call(call: dict[str, Any]) -> Call:
    function = call["function"]
    given = function["arguments"]
    if isinstance(given, str):
        arguments = given if _is_object(given) else json.dumps({"arguments": given}, ensure_ascii=False)
    else:
        arguments = json.dumps(given, ensure_ascii=False)
    return Call(function["name"], arguments, call.get("id"))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _complete(tool: Tool) -> Tool:
    """A tool with the members that OpenAI lets a client leave out and that many templates read."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        parameters = {"type": "object"}
    complete = {
        **function,
        "description": function.get("description") or "",
        "parameters": {**parameters, "properties": parameters.get("properties") or {}},
    }
    return {**tool, "function": complete}
