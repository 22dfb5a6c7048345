"""Bodies of Ollama's routes -> the chat completions and text completions that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic import Field

from common.errors import Unsupported
from common.sampling import SamplingFields
from endpoints.errors import validated
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.completion import CompletionRequest
from endpoints.Ollama.types.request import ChatRequest, GenerateRequest, GenerationRequest, Message
from endpoints.paths import Paths

JsonObject: TypeAlias = dict[str, Any]


class OllamaChat(ChatCompletionRequest):
    """
    Attributes:
        ignored: what of the body has no effect, beside samplers.
    """

    ignored: list[str] = Field([])

    def without_effect(self) -> list[str]:
        return [*super().without_effect(), *self.ignored]


class OllamaCompletion(CompletionRequest):
    """As `OllamaChat`."""

    ignored: list[str] = Field([])

    def without_effect(self) -> list[str]:
        return [*super().without_effect(), *self.ignored]


# --- chats --------------------------------------------------------------------------------------------------------


def as_chat(body: ChatRequest, *, keeps: bool) -> tuple[OllamaChat, Paths]:
    """
    Args:
        keeps: the caller may say how long the model stays loaded.

    Returns:
        The chat completion, and where its fields come from.

    Raises:
        InvalidRequest: the body cannot be served as it is.
    """
    paths = _paths(body)
    for index, message in enumerate(body.messages):
        _add_images(paths, message.images, f"messages.{index}", f"messages.{index}.")
    values = _fields(body, keeps) | _thinking(body) | {"messages": [_message(message) for message in body.messages]}
    if body.tools:
        values["tools"] = body.tools
    return validated(OllamaChat, values), paths


def as_one_turn(body: GenerateRequest, *, keeps: bool) -> tuple[OllamaChat, Paths]:
    """As `as_chat()`: the prompt as the only message of a user."""
    paths = _paths(body)
    if body.template:
        raise Unsupported(
            "template: Go's templates are not known here. Send the finished prompt, with raw: true.", param="template"
        )
    turn: list[JsonObject] = [{"role": "system", "content": body.system}] if body.system else []
    _add_images(paths, body.images, f"messages.{len(turn)}", "")
    paths.add("messages", "prompt")
    turn.append(_said("user", body.prompt, body.images))
    return validated(OllamaChat, _fields(body, keeps) | _thinking(body) | {"messages": turn}), paths


def _message(message: Message) -> JsonObject:
    said = _said(message.role, message.content, message.images)
    if message.thinking:
        said["reasoning_content"] = message.thinking
    if message.tool_calls:
        said["tool_calls"] = [{"id": call.id, "function": call.function.model_dump()} for call in message.tool_calls]
    if message.role == "tool":
        said |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return said


def _said(role: str, text: str, images: Sequence[str]) -> JsonObject:
    if not images:
        return {"role": role, "content": text}
    shown = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}  # in Ollama's order


def _data_url(image: str) -> str:
    return image if image.startswith("data:") else f"data:image;base64,{image}"


def _thinking(body: GenerationRequest) -> JsonObject:
    if body.think is None:
        return {}
    if isinstance(body.think, bool):
        return {"enable_thinking": body.think}
    return {"enable_thinking": True, "reasoning_effort": body.think}


# --- texts --------------------------------------------------------------------------------------------------------


def as_completion(body: GenerateRequest, *, keeps: bool) -> tuple[OllamaCompletion, Paths]:
    """As `as_chat()`: the prompt without a template, after the system prompt where there is one."""
    if body.images:
        raise Unsupported(
            "images need a prompt that goes through the chat template: no raw and no suffix.", param="images"
        )
    alone = body.raw or body.suffix or not body.system
    prompt = body.prompt if alone else f"{body.system}\n\n{body.prompt}"
    values = _fields(body, keeps) | {"prompt": prompt}
    if body.suffix:
        values["suffix"] = body.suffix
    return validated(OllamaCompletion, values), _paths(body)


# --- both ---------------------------------------------------------------------------------------------------------


def _fields(body: GenerationRequest, keeps: bool) -> JsonObject:
    """What both say about the answer. What the body leaves out is left to the presets, but that there is one."""
    options = body.options
    given = options.model_fields_set & SamplingFields.model_fields.keys()
    values = {name: getattr(options, name) for name in given}
    values |= {"n": 1, "logprobs": body.logprobs or None, "top_logprobs": body.top_logprobs, "stream": body.stream}
    if body.format == "json":
        values["response_format"] = {"type": "json_object"}
    elif body.format is not None:
        values["guided_json"] = body.format
    ignored = {
        "num_ctx": options.num_ctx is not None,
        "context": isinstance(body, GenerateRequest) and bool(body.context),
        "keep_alive": body.keep_alive is not None and not keeps,
    }
    return values | {"ignored": [name for name, given in ignored.items() if given]}


def _paths(body: GenerationRequest) -> Paths:
    paths = Paths()
    for name in type(body.options).model_fields:
        paths.add(name, f"options.{name}")
    renamed = {"max_tokens": "options.num_predict", "guided_json": "format", "response_format": "format"}
    for name, origin in renamed.items():
        paths.add(name, origin)
    for name in ("logprobs", "top_logprobs"):
        paths.add(name, name)
    return paths


def _add_images(paths: Paths, images: Sequence[str], message: str, origin: str) -> None:
    for place in range(len(images)):
        paths.add(f"{message}.content.{place}", f"{origin}images.{place}")
        paths.add(f"{message}.content.{place}.image_url", f"{origin}images.{place}")
