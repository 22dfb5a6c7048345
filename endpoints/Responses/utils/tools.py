"""Tools of a request -> functions as chat completions know them, and back to what is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from common.errors import Unsupported
from endpoints.Responses.types.tools import (
    BuiltInTool,
    ChosenTool,
    CustomFormat,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    Tool,
    ToolChoice,
)

ChatTool: TypeAlias = dict[str, Any]  # in the form of a chat completion

INPUT: Final = "input"  # the one argument of the function that a custom tool becomes
_SEPARATOR: Final = "__"


class Callable(NamedTuple):
    """What a function of the chat stands for.

    Attributes:
        path: of the tool in the request.
        is_custom: it takes a text.
    """

    path: str
    name: str
    namespace: str | None
    is_custom: bool


class ToolTable:
    """The tools of one request.

    Attributes:
        chat: the functions, in the order of the request.
        used: the tools that they stand for, as the client gave them.
        left_out: types of those that can be no functions, such as a web search of OpenAI's.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.chat: list[ChatTool] = []
        self.used: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._callables: list[Callable] = []
        for index, tool in enumerate(tools):
            if isinstance(tool, BuiltInTool):
                self.left_out.append(tool.type)
                continue
            self.used.append(tool.model_dump(exclude_none=True))
            for callable_, function in _functions(tool, f"tools.{index}"):
                self._callables.append(callable_)
                self.chat.append({"type": "function", "function": {"name": chat_name(*callable_[1:3]), **function}})
        # Of two with one name the chat says what is wrong.
        self._by_name = {chat_name(each.name, each.namespace): each for each in self._callables}

    @property
    def paths(self) -> list[str]:
        """Of each function, in the request."""
        return [each.path for each in self._callables]

    def called(self, name: str) -> Callable:
        """What a function of the chat stands for."""
        return self._by_name.get(name) or Callable("", name, None, False)

    def choice(self, choice: ToolChoice) -> str | dict[str, Any]:
        """A choice in the form of a chat completion. Raises `Unsupported` for that of a built-in tool."""
        if isinstance(choice, str):
            return choice
        if isinstance(choice, ChosenTool):
            if choice.name is None:
                raise Unsupported(
                    f"tool_choice asks for {choice.type}, which is not available here: choose a function or a custom "
                    "tool by its name.",
                    param="tool_choice.type",
                )
            return _chosen(choice)
        named = [_chosen(tool) for tool in choice.tools if tool.name is not None]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a function in the chat."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def shown_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """A choice as the response repeats it."""
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _chosen(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": chat_name(tool.name or "", tool.namespace)}}


def _functions(
    tool: FunctionTool | CustomTool | NamespaceTool, path: str, namespace: str | None = None
) -> Iterator[tuple[Callable, ChatTool]]:
    if isinstance(tool, NamespaceTool):
        for index, inner in enumerate(tool.tools):
            yield from _functions(inner, f"{path}.tools.{index}", tool.name)
    elif isinstance(tool, CustomTool):
        yield Callable(path, tool.name, namespace, True), _of_text(tool)
    else:
        function = tool.model_dump(exclude={"type", "name"}, exclude_none=True)
        yield Callable(path, tool.name, namespace, False), function


def _of_text(tool: CustomTool) -> ChatTool:
    """A tool that takes a text, as a function with one argument."""
    text: dict[str, Any] = {"type": "string", "description": "The text that the tool takes."}
    described = [tool.description] if tool.description else []
    form = tool.format or CustomFormat()
    if form.type == "grammar" and form.definition:
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
        described.append(f"The text must match this {form.syntax or 'lark'} grammar:\n{form.definition}")
    return {
        "description": "\n\n".join([*described, f"Give the text, as it is, as the argument {INPUT}."]),
        "parameters": {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
        # A grammar cannot be enforced within the JSON of arguments; a pattern can.
        "strict": "pattern" in text,
    }
