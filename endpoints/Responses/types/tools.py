"""Tools, as requests describe them and choose among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from common.limits import MAX_TOOLS, at_most
from common.sampling import RequestModel
from endpoints.OAI.types.tools import FunctionName

# --- described ----------------------------------------------------------------------------------------------------


class FunctionTool(RequestModel):
    """
    Attributes:
        parameters: a JSON schema of the arguments; none allows any.
        strict: the schema is enforced while a call is generated.
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(RequestModel):
    """Of the text that a tool takes: any, or what matches a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(RequestModel):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(RequestModel):
    """Several tools whose names are their own only together with that of the group."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        at_most(MAX_TOOLS),
    ]


class BuiltInTool(RequestModel):
    """A tool that OpenAI runs itself, or one that is not known here."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1)]


_OWN = frozenset({"function", "custom", "namespace"})


def _kind(value: object) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in _OWN else "built_in"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[BuiltInTool, Tag("built_in")],
    Discriminator(_kind),
]
Tools: TypeAlias = Annotated[list[Tool], at_most(MAX_TOOLS)]

# --- chosen -------------------------------------------------------------------------------------------------------


class ChosenTool(RequestModel):
    """
    Attributes:
        type: function, custom, or that of a built-in tool, which has no name.
    """

    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class AllowedTools(RequestModel):
    """Some of the tools, so that the prompt stays the same whichever may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], at_most(MAX_TOOLS)]


def _choice(value: object) -> str:
    if isinstance(value, (dict, BaseModel)):
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return "allowed" if kind == "allowed_tools" else "chosen"
    return "mode"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenTool, Tag("chosen")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_choice),
]
