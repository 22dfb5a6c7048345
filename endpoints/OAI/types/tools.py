"""Tools that a model may call, as requests describe them and as answers call them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)

from common.limits import MAX_TOOLS, at_most
from common.parsing.formats.base import NAME_LENGTH
from common.sampling import RequestModel
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE

FunctionName: TypeAlias = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH)]

# --- described ----------------------------------------------------------------------------------------------------


class _AsGiven(RequestModel):
    """An object whose members reach the chat template in the order of the client, unknown ones too."""

    model_config = ConfigDict(extra="allow")

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, values: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        model = validated(values)
        if isinstance(values, dict):
            model._given = {
                name: value for name, value in values.items() if value is not None or name not in cls.model_fields
            }
        return model


class FunctionSpec(_AsGiven):
    """
    Attributes:
        parameters: a JSON schema of the arguments; none allows any.
        strict: the schema is enforced while a call is generated.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @property
    def given(self) -> dict[str, Any]:
        return self._given


def _wrapped(value: object) -> object:
    """A function that is described without the object around it, as OpenAI's newer API has it."""
    if isinstance(value, dict) and "name" in value and not {"function", "custom"} & value.keys():
        function = {name: item for name, item in value.items() if name != "type"}
        return {"type": value.get("type") or "function", "function": function}
    return value


class ToolSpec(_AsGiven):
    type: str = "function"
    function: FunctionSpec | None = None

    @property
    def given(self) -> dict[str, Any]:
        """As the client described it."""
        if self.function is None:
            return self._given
        return {name: self.function.given if name == "function" else item for name, item in self._given.items()}


Tool: TypeAlias = Annotated[ToolSpec, BeforeValidator(_wrapped, json_schema_input_type=ToolSpec | FunctionSpec)]

# --- chosen -------------------------------------------------------------------------------------------------------


class ToolFunction(RequestModel):
    name: FunctionName


def _flat(value: object) -> object:
    """A name of a function without the object around it, as OpenAI's newer API has it."""
    if isinstance(value, dict) and "function" not in value and "name" in value:
        return {**value, "function": {"name": value["name"]}}
    return value


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: ToolFunction


_Named: TypeAlias = Annotated[NamedTool, BeforeValidator(_flat, json_schema_input_type=NamedTool | ToolFunction)]


class AllowedTools(RequestModel):
    """Some of the tools, so that the prompt stays the same whichever may be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[_Named], at_most(MAX_TOOLS)]


class ToolChoiceOfAllowed(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _nested(value: object) -> object:
    if isinstance(value, dict) and "allowed_tools" not in value and "tools" in value:
        return {**value, "allowed_tools": {name: item for name, item in value.items() if name != "type"}}
    return value


def _kind(value: object) -> str:
    if isinstance(value, (dict, NamedTool, ToolChoiceOfAllowed)):
        kind = value.get("type") if isinstance(value, dict) else value.type
        return "allowed" if kind == "allowed_tools" else "named"
    return "mode"


def _any(value: object) -> object:
    return "required" if value == "any" else value  # the word of other APIs


_Mode: TypeAlias = Annotated[
    Literal["none", "auto", "required"],
    BeforeValidator(_any, json_schema_input_type=Literal["none", "auto", "required", "any"]),
]
_Allowed: TypeAlias = Annotated[
    ToolChoiceOfAllowed, BeforeValidator(_nested, json_schema_input_type=ToolChoiceOfAllowed | AllowedTools)
]
ToolChoice: TypeAlias = Annotated[
    Annotated[_Mode, Tag("mode")] | Annotated[_Named, Tag("named")] | Annotated[_Allowed, Tag("allowed")],
    Discriminator(_kind),
]
FunctionChoice: TypeAlias = Literal["none", "auto"] | ToolFunction

# --- called -------------------------------------------------------------------------------------------------------


class CalledFunction(BaseModel):
    """
    Attributes:
        arguments: JSON of an object.
    """

    name: str
    arguments: str


class CalledTool(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(BaseModel):
    name: str | None = LEFT_OUT_IF_NONE
    arguments: str


class CalledToolDelta(BaseModel):
    """A piece of a call. The first one has its id and name; the arguments of all joined are JSON of an object."""

    index: int
    id: str | None = LEFT_OUT_IF_NONE
    type: Literal["function"] | None = LEFT_OUT_IF_NONE
    function: CalledFunctionDelta
