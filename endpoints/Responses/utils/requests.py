"""A request -> the chat completion that answers it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from common.errors import InvalidRequest, Unsupported
from common.sampling import SamplingFields
from endpoints.errors import validated
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.paths import Paths
from endpoints.Responses.types.items import AdditionalToolsItem, InputItem
from endpoints.Responses.types.request import ResponsesRequest, TextFormat
from endpoints.Responses.types.tools import Tools
from endpoints.Responses.utils.conversation import Conversation
from endpoints.Responses.utils.tools import ToolTable

# Fields that both APIs have under the same name and with the same meaning.
_SHARED: Final = frozenset(SamplingFields.model_fields) - {"logprobs", "top_logprobs"} | {
    "enable_thinking",
    "model",
    "parallel_tool_calls",
    "reasoning_budget_tokens",
    "template_vars",
    "user",
}
_PATHS: Final = (
    ("messages", "input"),
    ("response_format", "text.format"),
    ("response_format.json_schema", "text.format.schema"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("tool_choice.allowed_tools", "tool_choice"),
)
_KIND: Final = re.compile(r"[a-z0-9_]{1,64}")
_TOOLS: Final[TypeAdapter[Tools]] = TypeAdapter(Tools)


class ChatRequest:
    """The chat completion of a request.

    Attributes:
        body: of it.
        paths: of the request's fields.
        tools: of the request.
        left_out: types of tools and items of which the model hears nothing, fit for a header.

    Args:
        history: items that the request goes on from.
        items: of the request, without references.

    Raises:
        InvalidRequest: the request cannot be served as it is.
    """

    def __init__(self, request: ResponsesRequest, history: Sequence[InputItem], items: Sequence[InputItem]) -> None:
        _check_supported(request)
        if not (history or items):
            raise InvalidRequest("input is missing: give a text or a list of items.", param="input")
        self.paths = Paths()
        conversation = Conversation(self.paths)
        if request.instructions:
            conversation.add_instructions(request.instructions)
        conversation.add(history, "previous_response_id")
        conversation.add(items, "input")
        self.tools = ToolTable([*request.tools, *_additional_tools([*history, *items])])
        left_out = [*self.tools.left_out, *conversation.left_out]
        self.left_out = list(dict.fromkeys(kind if _KIND.fullmatch(kind) else "?" for kind in left_out))
        for chat_path, path in _PATHS:
            self.paths.add(chat_path, path)
        for index, path in enumerate(self.tools.paths):
            self.paths.add(f"tools.{index}.function", path)
        values = {
            **{name: getattr(request, name) for name in _SHARED & request.model_fields_set},
            "messages": conversation.messages,
            "tools": self.tools.chat or None,
            "tool_choice": self.tools.choice(request.tool_choice),
            "response_format": _response_format(request.text.format),
            "reasoning_effort": request.reasoning.effort,
            "verbosity": request.text.verbosity,
            "logprobs": True if request.alternatives is not None else None,
            "top_logprobs": request.alternatives,
        }
        with self.paths.as_sent():
            self.body = validated(ChatCompletionRequest, values)


def _check_supported(request: ResponsesRequest) -> None:
    """Raise `Unsupported` for what needs something that is not kept here."""
    if request.conversation is not None:
        raise Unsupported(
            "conversation: there are no conversations here; go on with previous_response_id, or send all items.",
            param="conversation",
        )
    if request.prompt is not None:
        raise Unsupported("prompt: there are no stored prompts here; send instructions and input.", param="prompt")


def _additional_tools(items: Sequence[InputItem]) -> Tools:
    given = [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]
    try:
        return _TOOLS.validate_python(given)
    except ValidationError as error:
        raise InvalidRequest("input holds additional_tools that are no tools.", param="input") from error


def _response_format(given: TextFormat) -> dict[str, Any] | None:
    if given.type == "json_schema":
        return {"type": given.type, "json_schema": {"name": given.name, "schema": given.schema_}}
    return None if given.type == "text" else {"type": given.type}
