"""What a request says about tools -> which of them an answer may call, or has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from common.errors import InvalidRequest, Unsupported
from common.parsing.dialect import CallRules
from common.parsing.formats.base import Tool, Tools
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.tools import FunctionSpec, NamedTool, ToolChoiceOfAllowed, ToolFunction, ToolSpec

_Mode: TypeAlias = Literal["none", "auto", "required"]


class ToolUse(NamedTuple):
    """Which tools an answer may call.

    Attributes:
        declared: as the client described them; None where it named none.
        callable: those of them that may be called.
        mode: of `tool_choice`.
        many: there may be more than one call.
    """

    declared: list[dict[str, Any]] | None
    callable: Tools
    mode: _Mode
    many: bool

    @property
    def rules(self) -> CallRules | None:
        """What has to hold of the calls; None where there can be none."""
        if not self.callable:
            return None
        return CallRules(list(self.callable.values()), required=self.mode == "required", many=self.many)


def tool_use(body: ChatCompletionRequest) -> ToolUse:
    """
    Raises:
        InvalidRequest: a tool has no name, or another one's, or a choice names none of them.
        Unsupported: a tool is no function.
    """
    described = _described(body)
    tools: dict[str, Tool] = {}
    for path, function, _ in described:
        if function.name in tools:
            raise InvalidRequest(
                f"{path}.name {function.name!r} is the name of another tool too.", param=f"{path}.name"
            )
        tools[function.name] = Tool(function.name, function.parameters or {}, function.strict, f"{path}.parameters")
    choice = _choice(body)
    for name in choice.names or ():
        if name not in tools:
            raise InvalidRequest(f"{choice.param} names {name!r}, which is none of the tools.", param=choice.param)
    if choice.mode == "required" and not (tools if choice.names is None else choice.names):
        raise InvalidRequest(f"{choice.param} asks for a call, but there are no tools.", param=choice.param)
    allowed = () if choice.mode == "none" else tools if choice.names is None else choice.names
    return ToolUse(
        [given for _, _, given in described] or None,
        Tools(tool for tool in tools.values() if tool.name in allowed),
        choice.mode,
        body.parallel_tool_calls and not choice.is_one,
    )


class _Described(NamedTuple):
    path: str  # of the function in the request
    function: FunctionSpec
    given: dict[str, Any]


class _Choice(NamedTuple):
    """
    Attributes:
        names: of the tools that it is about; None for all.
        param: the field that says so.
    """

    mode: _Mode
    names: Sequence[str] | None = None
    param: str = "tool_choice"

    @property
    def is_one(self) -> bool:
        """Whether it is a call, rather than calls."""
        return self.mode == "required" and self.names is not None and len(self.names) == 1


def _described(body: ChatCompletionRequest) -> list[_Described]:
    if body.tools:
        return [
            _Described(f"tools.{index}.function", _function_of(tool, f"tools.{index}"), tool.given)
            for index, tool in enumerate(body.tools)
        ]
    return [
        _Described(f"functions.{index}", function, {"type": "function", "function": function.given})
        for index, function in enumerate(body.functions or ())
    ]


def _function_of(tool: ToolSpec, path: str) -> FunctionSpec:
    if tool.type != "function":
        raise Unsupported(f"{path} is of type {tool.type!r}; only functions can be called here.", param=f"{path}.type")
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is missing.", param=f"{path}.function")
    return tool.function


def _choice(body: ChatCompletionRequest) -> _Choice:
    choice = body.tool_choice
    if choice is None and body.function_call is not None:
        if isinstance(body.function_call, ToolFunction):
            return _Choice("required", [body.function_call.name], "function_call")
        return _Choice(body.function_call, param="function_call")
    if isinstance(choice, NamedTool):
        return _Choice("required", [choice.function.name])
    if isinstance(choice, ToolChoiceOfAllowed):
        allowed = choice.allowed_tools
        return _Choice(allowed.mode, [tool.function.name for tool in allowed.tools])
    return _Choice(choice or "auto")
