"""Items of an input: what a client says, and what earlier answers consisted of, as it comes back."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from common.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, at_most
from common.sampling import RequestModel

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

# --- content ------------------------------------------------------------------------------------------------------


class InputPart(RequestModel):
    """A part of a content. Which member counts depends on the type.

    Attributes:
        image_url: of an image, which may be a data URL.
        file_id: of a file at OpenAI.
        detail: of an image, which is shown as it is.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


def _parts(value: object) -> object:
    """A text is the same as one part with it."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of content parts")
    return [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in value]


Parts: TypeAlias = Annotated[
    list[InputPart],
    at_most(MAX_PARTS),
    BeforeValidator(_parts, json_schema_input_type=str | list[str | InputPart]),
]


class TextPart(RequestModel):
    """Of a thought. `type` says whether it is the thought itself or a summary."""

    type: str = "reasoning_text"
    text: str


_Texts: TypeAlias = Annotated[list[TextPart], at_most(MAX_PARTS)]

# --- items --------------------------------------------------------------------------------------------------------


class Item(RequestModel):
    id: str | None = None
    status: ItemStatus | None = None


class MessageItem(Item):
    """What somebody says. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Annotated[str, Field(min_length=1)] = "user"
    content: Parts


class ReasoningItem(Item):
    """A thought. Of its three forms the first that is there counts.

    Attributes:
        encrypted_content: from `utils/thoughts.py`; that of another server says nothing here.
    """

    type: Literal["reasoning"]
    encrypted_content: str | None = None
    content: _Texts = Field([])
    summary: _Texts = Field([])


class FunctionCallItem(Item):
    """
    Attributes:
        arguments: JSON of an object, or whatever a model once made of it.
        namespace: of the function, where it was described in one.
    """

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str = ""
    namespace: str | None = None


class CustomCallItem(Item):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    input: str = ""
    namespace: str | None = None


class CallOutputItem(Item):
    """What a call has led to.

    Attributes:
        call_id: none for the first call without a result.
    """

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: Parts


class BuiltInCallItem(Item):
    """A call of a tool of OpenAI's that clients run themselves. What it shall do is in its other members."""

    model_config = ConfigDict(extra="allow")

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str


class BuiltInOutputItem(Item):
    """What such a call has led to.

    Attributes:
        call_id: of the call; that of a local shell is in `id`.
        output: a text, or objects that say what a command printed.
    """

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    output: Any = None


class ReferenceItem(RequestModel):
    """An item of a stored response, or of its input."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class AdditionalToolsItem(Item):
    """More tools, as those of the request."""

    type: Literal["additional_tools"]
    tools: Annotated[list[dict[str, Any]], at_most(MAX_TOOLS)]


class LeftOutItem(Item):
    """What says nothing to a model that has not made it itself, such as a search of OpenAI's."""

    model_config = ConfigDict(extra="allow")

    type: str


# Items that agents keep in their history when they change to another model, and that are of no use to it.
LEFT_OUT: Final = frozenset(
    {
        "agent_message",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_KINDS: Final = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "function_call_output": "call_output",
    "custom_tool_call": "custom_tool_call",
    "custom_tool_call_output": "call_output",
    "local_shell_call": "built_in_call",
    "shell_call": "built_in_call",
    "apply_patch_call": "built_in_call",
    "local_shell_call_output": "built_in_output",
    "shell_call_output": "built_in_output",
    "apply_patch_call_output": "built_in_output",
    "item_reference": "reference",
    "additional_tools": "additional_tools",
    **dict.fromkeys(LEFT_OUT, "left_out"),
}


def _kind(value: object) -> str | None:
    given = value if isinstance(value, dict) else vars(value) if isinstance(value, BaseModel) else {"type": ""}
    kind = given.get("type")
    if kind is None:  # both may leave it out
        kind = "item_reference" if given.keys() <= {"id", "type"} and given.get("id") else "message"
    return _KINDS.get(kind) if isinstance(kind, str) else None


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("call_output")]
    | Annotated[BuiltInCallItem, Tag("built_in_call")]
    | Annotated[BuiltInOutputItem, Tag("built_in_output")]
    | Annotated[ReferenceItem, Tag("reference")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[LeftOutItem, Tag("left_out")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="should be an item of a type that is known here, such as message or function_call_output",
    ),
]


def _items(value: object) -> object:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


InputItems: TypeAlias = Annotated[
    list[InputItem], at_most(MAX_MESSAGES), BeforeValidator(_items, json_schema_input_type=str | list[InputItem])
]
