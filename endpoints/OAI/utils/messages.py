"""Messages of a request -> messages as chat templates know them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from common.conversations import SYSTEM_ROLES, Message
from common.errors import InvalidRequest
from common.parsing.json_text import refuse_constant
from common.prefixes import without_volatile_line
from common.templating import ChatTemplate, TemplateTraits
from endpoints.OAI.types.message import ChatMessage, FunctionCall, ImageNames, ToolCall
from endpoints.OAI.utils.images import NO_IMAGES

_SHORT_ID = 9  # characters


def template_messages(
    messages: Sequence[ChatMessage],
    template: ChatTemplate,
    *,
    path: str,
    keep_volatile_lines: bool,
    images: ImageNames = NO_IMAGES,
) -> list[Message]:
    """A conversation in the form of today: every message in its place, its content one text.

    Calls of functions are calls of tools, every call has an id, and results stand in the order of the calls.

    Args:
        template: whose traits and roles decide where there are several forms.
        path: of the messages in the request, for errors.
        images: whose names are a part of the texts.

    Raises:
        InvalidRequest: a message holds what no template can show.
    """
    texts = [message.texts(f"{path}.{index}", images) for index, message in enumerate(messages)]
    dropped = None if keep_volatile_lines else _drop_volatile_line(messages, texts)
    calls = _Calls(template)
    prepared: list[Message] = []
    for index, (message, parts) in enumerate(zip(messages, texts, strict=True)):
        if index != dropped:
            prepared.append(_template_message(message, "".join(parts), calls, f"{path}.{index}"))
    return list(_in_order_of_calls(prepared))


def _drop_volatile_line(messages: Sequence[ChatMessage], texts: list[list[str]]) -> int | None:
    """Take a line that changes with every request out of the first system message.

    Returns:
        The index of that message, where nothing else is in it.
    """
    first = next((index for index, message in enumerate(messages) if message.role in SYSTEM_ROLES), None)
    if first is None or not texts[first]:
        return None
    # The line may be a part of its own, without an end.
    shortened = without_volatile_line(texts[first][0])
    if shortened == texts[first][0]:
        return None
    texts[first][0] = shortened
    return None if any(texts[first]) or len(messages) == 1 else first


def _template_message(message: ChatMessage, text: str, calls: _Calls, path: str) -> Message:
    role = message.role
    if role == "developer" and not calls.template.knows_role(role):
        role = "system"  # what OpenAI renamed, under the name that older templates know
    known: Message = {"role": role, "content": text, "name": message.name}
    known["reasoning_content"] = message.reasoning_content
    if role == "assistant":
        known["tool_calls"] = calls.made(message, path)
        if known["tool_calls"] and not text and calls.template.traits.null_content:
            return _given(known, message) | {"content": None}
    elif role in ("tool", "function"):
        known["role"] = "tool"
        known["tool_call_id"] = calls.answered(message)
    return _given(known, message)


def _given(known: Message, message: ChatMessage) -> Message:
    others = message.model_extra or {}
    return {name: value for name, value in {**known, **others}.items() if value is not None}


# --- calls of tools -----------------------------------------------------------------------------------------------


class _Calls:
    """The calls of a conversation, which its results refer to."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._made = 0
        self._open: list[tuple[str, str]] = []  # id and name of the calls without a result so far, in order

    def made(self, message: ChatMessage, path: str) -> list[dict[str, Any]] | None:
        """The calls of an assistant's message."""
        calls = [
            self._call(call, function_of(call, f"{path}.tool_calls.{index}"))
            for index, call in enumerate(message.tool_calls or ())
        ]
        if not calls and message.function_call is not None:
            calls = [self._call(ToolCall(), message.function_call)]
        self._open = [(call["id"], call["function"]["name"]) for call in calls]
        return calls or None

    def answered(self, message: ChatMessage) -> str:
        """The id of the call that a message holds the result of. Without an id: the first open one, of that name."""
        given = self._id(message.tool_call_id)
        if given is None:
            candidates = [call for call in self._open if message.name in (None, call[1])] or self._open
            given = candidates[0][0] if candidates else self._new_id()
        self._open = [call for call in self._open if call[0] != given]
        return given

    def _call(self, call: ToolCall, function: FunctionCall) -> dict[str, Any]:
        self._made += 1
        arguments = template_arguments(function.arguments, self.template.traits)
        return {
            "id": self._id(call.id) or self._new_id(),
            "type": "function",
            "function": {"name": function.name, "arguments": arguments, **(function.model_extra or {})},
            **(call.model_extra or {}),
        }

    def _new_id(self) -> str:
        # The same in every later request of the conversation.
        return f"call{self._made:0{_SHORT_ID - 4}}"

    def _id(self, given: str | None) -> str | None:
        if given and self.template.traits.short_ids and not _is_short(given):
            return sha256(given.encode()).hexdigest()[:_SHORT_ID]
        return given or None


def _is_short(call_id: str) -> bool:
    return len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()


def function_of(call: ToolCall, path: str) -> FunctionCall:
    """What a call calls; a custom tool takes one text."""
    if call.function is not None:
        return call.function
    if call.custom is not None:
        return FunctionCall(name=call.custom.name, arguments={"input": call.custom.input})
    raise InvalidRequest(f"{path}.function is missing.", param=f"{path}.function")


def template_arguments(given: Any, traits: TemplateTraits) -> Any:
    """Arguments as a template wants them. What a model once botched shall not end the chat, and stays as it is."""
    value = {} if given is None or given == "" else given
    if isinstance(value, str):
        try:
            parsed = json.loads(value, parse_constant=refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            parsed = value
        value = {} if parsed is None else parsed if isinstance(parsed, dict) else given
    elif not isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if traits.text_arguments:
        return given if isinstance(given, str) and given else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and traits.mapping_arguments:
        return {"arguments": value}
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large a number")
    return number


def _in_order_of_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Results that follow an assistant's calls, in the order of the calls; unknown ones last."""
    order: dict[str, int] = {}
    results: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        yield from sorted(results, key=lambda result: order.get(result["tool_call_id"], len(order)))
        results = []
        order = {call["id"]: index for index, call in enumerate(message.get("tool_calls") or ())}
        yield message
    yield from sorted(results, key=lambda result: order.get(result["tool_call_id"], len(order)))
