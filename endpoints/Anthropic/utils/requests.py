"""Bodies of Anthropic's API -> the chat completions that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from common.config_models import ModelParameters
from common.errors import InvalidRequest, Unsupported
from common.limits import MAX_PARTS
from common.sampling import SamplingFields
from endpoints.Anthropic.types.request import (
    Block,
    DocumentBlock,
    ImageBlock,
    Markable,
    MessagesRequest,
    PromptFields,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from endpoints.Anthropic.utils.ids import own_id
from endpoints.errors import validated
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.common import ResponseFormat
from endpoints.OAI.types.message import ChatMessage, ContentPart, FunctionCall, ImageUrl, ToolCall
from endpoints.OAI.types.tools import FunctionSpec, NamedTool, ToolFunction, ToolSpec
from endpoints.paths import Paths

# Between two blocks of text, where there is no line break: they are texts of their own, such as a reminder and a
# question.
_SEPARATOR: Final = "\n\n"
_CUSTOM: Final = "custom"

ShownThoughts: TypeAlias = Literal["whole", "omitted", "none"]  # omitted: their blocks, without text


class Translated(NamedTuple):
    """A body, as a chat completion.

    Attributes:
        paths: of the body's fields.
        thoughts: how much of them the client wants to see.
    """

    chat: ChatCompletionRequest
    paths: Paths
    thoughts: ShownThoughts


def as_chat(body: PromptFields, model: ModelParameters) -> Translated:
    """
    Args:
        model: settings of the model that answers.

    Raises:
        InvalidRequest: the body cannot be served as it is.
    """
    if body.mcp_servers:
        raise Unsupported("mcp_servers: this server connects to none; let the client do that.", param="mcp_servers")
    conversation = _Conversation()
    conversation.add_body(body)
    paths = conversation.paths
    fields: dict[str, Any] = {"messages": conversation.messages, "template_vars": body.template_vars}
    fields |= _tool_fields(body, paths)
    fields |= _format_fields(body, paths)
    thinks, thoughts = _thinking(body, model)
    if thinks is not None:
        fields["enable_thinking"] = thinks
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        fields["reasoning_budget_tokens"] = body.thinking.budget_tokens
    if body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.messages[-1].role == "assistant":
        # Calls cannot be gone on from; their tokens can be counted.
        begun = not conversation.messages[-1].tool_calls
        fields |= {"add_generation_prompt": False, "continue_final_message": begun}
    if isinstance(body, MessagesRequest):
        fields |= _answer_fields(body)
        paths.add("stop", "stop_sequences")
    with paths.as_sent():
        chat = validated(ChatCompletionRequest, fields)
    return Translated(chat, paths, thoughts)


def _answer_fields(body: MessagesRequest) -> dict[str, Any]:
    """What a body says about the answer. What it leaves out is left to the presets."""
    last = len(body.messages) - 1
    if any(isinstance(block, ToolUseBlock) for block in body.messages[last].content):
        raise InvalidRequest(
            f"messages.{last} ends the conversation with a tool_use, after which a message of the user with its "
            "tool_result has to follow.",
            param=f"messages.{last}",
        )
    given = body.model_fields_set & SamplingFields.model_fields.keys()
    fields = {name: getattr(body, name) for name in given}
    if stops := [stop for stop in body.stop_sequences if stop]:
        fields["stop"] = [*stops, *body.stop]
    return {**fields, "stream": body.stream}


def _thinking(body: PromptFields, model: ModelParameters) -> tuple[bool | None, ShownThoughts]:
    """Whether the model shall think, if the body says so, and what the client wants to see of it.

    In Anthropic's API a model does not think unless it is asked to, and clients that have not asked take the first
    block of an answer for its text. Here the model's own settings may say something else.
    """
    thinking = body.thinking
    if thinking is None:
        settings = model.template_variables(body.template_vars)
        if "enable_thinking" in settings:
            return None, "whole" if settings["enable_thinking"] else "none"
        return False, "none"
    if thinking.type == "disabled":
        return False, "none"
    return True, "omitted" if thinking.display == "omitted" else "whole"


def _format_fields(body: PromptFields, paths: Paths) -> dict[str, Any]:
    wanted = body.output_config.format or body.output_format
    if wanted is None:
        return {}
    path = "output_config.format" if body.output_config.format is not None else "output_format"
    paths.add("response_format", path)
    paths.add("response_format.json_schema", path)
    return {"response_format": ResponseFormat(type="json_schema", json_schema={"schema": wanted.schema_})}


# --- tools --------------------------------------------------------------------------------------------------------


def _tool_fields(body: PromptFields, paths: Paths) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools)]
        for index in range(len(body.tools)):
            paths.add(f"tools.{index}.function", f"tools.{index}")
            paths.add(f"tools.{index}.function.parameters", f"tools.{index}.input_schema")
    choice = body.tool_choice
    if choice is None:
        return fields
    match choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest("tool_choice.name is missing.", param="tool_choice.name")
            fields["tool_choice"] = NamedTool(function=ToolFunction(name=choice.name))
        case _:
            fields["tool_choice"] = choice.type
    return {**fields, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool(tool: Tool, path: str) -> ToolSpec:
    if tool.type != _CUSTOM:
        raise Unsupported(
            f"{path} is of type {tool.type!r}, which only Anthropic's models and servers know. Describe a tool of your "
            "own, with an input_schema, and run it in the client.",
            param=f"{path}.type",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict or None,
        "input_examples": tool.input_examples,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return ToolSpec.model_validate({"type": "function", "function": FunctionSpec.model_validate(given)})


# --- messages -----------------------------------------------------------------------------------------------------


class _Sent(NamedTuple):
    """A block, and its path in the body."""

    block: Block
    path: str


class _Part(NamedTuple):
    """A part of a message, and the path of what it shows in the body."""

    part: ContentPart
    path: str


class _Conversation:
    """The messages of a chat completion, as they are put together.

    Attributes:
        paths: where they come from.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.paths = Paths()

    def add_body(self, body: PromptFields) -> None:
        if body.system:
            self._add_shown("system", [_Sent(block, f"system.{index}") for index, block in enumerate(body.system)])
            self.paths.add("messages.0", "system")
        for index, message in enumerate(body.messages):
            sent = [_Sent(block, f"messages.{index}.content.{place}") for place, block in enumerate(message.content)]
            first = len(self.messages)
            if message.role == "assistant":
                self._add_answer(sent)
            else:
                self._add_turn(message.role, sent)
            for place in range(first, len(self.messages)):
                self.paths.add(f"messages.{place}", f"messages.{index}")

    def _add_turn(self, role: str, sent: Sequence[_Sent]) -> None:
        """Results of calls are messages of their own, in their place among the rest."""
        rest: list[_Sent] = []
        for block, path in sent:
            if not isinstance(block, ToolResultBlock):
                rest.append(_Sent(block, path))
                continue
            if rest:
                self._add_shown(role, rest)
                rest = []
            self._add_result(block, path)
        if rest or not sent:
            self._add_shown(role, rest)

    def _add_shown(self, role: str, sent: Sequence[_Sent]) -> None:
        parts = [part for block, path in sent for part in _shown(block, path)]
        self._append({"role": role, "content": _separated(parts)}, parts)

    def _add_result(self, result: ToolResultBlock, path: str) -> None:
        parts = [
            part for index, block in enumerate(result.content) for part in _shown(block, f"{path}.content.{index}")
        ]
        if result.is_error and not result.content:
            parts = [_text("Error", path)]
        parts += _mark_of(result, path)
        self._append({"role": "tool", "tool_call_id": own_id(result.tool_use_id), "content": _separated(parts)}, parts)

    def _add_answer(self, sent: Sequence[_Sent]) -> None:
        parts: list[_Part] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block, path in sent:
            match block:
                case ThinkingBlock(thinking=thought):
                    thoughts.append(thought)
                case RedactedThinkingBlock():
                    pass
                case ToolUseBlock():
                    function = FunctionCall(name=block.name, arguments=block.input)
                    calls.append(ToolCall(id=own_id(block.id), function=function))
                case _:
                    parts += _shown(block, path)
                    continue
            parts += _mark_of(block, path)
        members = {
            "role": "assistant",
            "content": [part for part, _ in parts],
            "reasoning_content": "".join(thoughts) or None,
            "tool_calls": calls or None,
        }
        self._append(members, parts)

    def _append(self, members: dict[str, Any], parts: Sequence[_Part]) -> None:
        index = len(self.messages)
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(
                f"{parts[0].path} begins a message of more than {MAX_PARTS} parts; send fewer blocks.",
                param=parts[0].path,
            )
        self.messages.append(ChatMessage.model_validate(members))
        for place, (_, path) in enumerate(parts):
            self.paths.add(f"messages.{index}.content.{place}", path)
            self.paths.add(f"messages.{index}.content.{place}.image_url", f"{path}.source")


def _shown(block: Block, path: str) -> list[_Part]:
    """The parts of a message that show a block to the model, and its mark if it has one.

    Raises:
        InvalidRequest: it cannot be shown.
    """
    return [*_parts(block, path), *_mark_of(block, path)]


def _mark_of(block: Markable, path: str) -> list[_Part]:
    """A part without text that marks the end of a block, if the block is marked."""
    if block.cache_control is None:
        return []
    return [_Part(ContentPart(text="", cache_control=block.cache_control), path)]


def _parts(block: Block, path: str) -> Iterator[_Part]:
    match block:
        case TextBlock(text=text):
            yield _text(text, path)
        case ImageBlock():
            yield _Part(ContentPart(type="image_url", image_url=ImageUrl(url=_image_url(block, path))), path)
        case DocumentBlock():
            yield from _document(block, path)
        case SearchResultBlock():
            texts = [block.title, block.source, *(text.text for text in block.content)]
            yield _text("\n".join(texts), path)
        case ToolReferenceBlock(tool_name=name):
            yield _text(f"The tool {name} can be used.", path)
        case ThinkingBlock() | RedactedThinkingBlock() | ToolUseBlock():
            raise InvalidRequest(
                f"{path} is of type {block.type}, which belongs into a message of the assistant.", param=f"{path}.type"
            )
        case ToolResultBlock():
            raise InvalidRequest(
                f"{path} is of type tool_result, which belongs into a message of the user.", param=f"{path}.type"
            )
        case _:
            raise Unsupported(
                f"{path} is of type {block.type!r}, which is not available here. Send what it says as a block of type "
                "text.",
                param=f"{path}.type",
            )


def _text(text: str, path: str) -> _Part:
    return _Part(ContentPart(text=text), path)


def _image_url(block: ImageBlock, path: str) -> str:
    source = block.source
    match source.type:
        case "base64":
            if source.data is None:
                raise InvalidRequest(f"{path}.source.data is missing.", param=f"{path}.source.data")
            return f"data:{source.media_type or 'image/png'};base64,{source.data}"
        case "url":
            if source.url is None:
                raise InvalidRequest(f"{path}.source.url is missing.", param=f"{path}.source.url")
            return source.url
        case _:
            raise Unsupported(
                f"{path}.source is of type {source.type!r}; images are of type base64 or url here.",
                param=f"{path}.source.type",
            )


def _document(block: DocumentBlock, path: str) -> Iterator[_Part]:
    source = block.source
    about = [text for text in (block.title, block.context) if text]
    match source.type:
        case "text" if source.data is not None:
            yield _text("\n".join([*about, source.data]), path)
        case "content" if source.content is not None:
            if about:
                yield _text("\n".join(about), path)
            for index, part in enumerate(source.content):
                yield from _shown(part, f"{path}.source.content.{index}")
        case "text" | "content":
            member = "data" if source.type == "text" else "content"
            raise InvalidRequest(f"{path}.source.{member} is missing.", param=f"{path}.source.{member}")
        case _:
            raise Unsupported(
                f"{path}.source is of type {source.type!r}, but only text can be read of documents: send it with the "
                "type text.",
                param=f"{path}.source.type",
            )


def _separated(parts: Sequence[_Part]) -> list[ContentPart]:
    """The parts, with texts that follow each other told apart. It depends on these two texts alone."""
    separated = [part for part, _ in parts]
    texts = [index for index, part in enumerate(separated) if part.text != ""]
    for one, other in pairwise(texts):
        text, next_text = separated[one].text, separated[other].text
        if text and next_text and not text.endswith("\n") and not next_text.startswith("\n"):
            separated[one] = ContentPart(text=text + _SEPARATOR)
    return separated
