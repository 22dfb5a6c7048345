"""Messages of a request -> prompt text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from backends.messages import ControlToken
from common.config_models import ModelParameters
from common.templating import ChatTemplate, Message, RenderedPrompt
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.message import ChatMessage, ToolCall


class PromptWriter:
    """Turns the conversations of requests into prompts for one loaded model.

    Args:
        template: of the model.
        model: the settings that it was loaded with.
        control_tokens: of its tokenizer.
    """

    def __init__(
        self, template: ChatTemplate, model: ModelParameters, control_tokens: Sequence[ControlToken] = ()
    ) -> None:
        self.template = template
        self._model = model
        self._control_tokens = control_tokens

    def chat(self, body: ChatCompletionRequest) -> RenderedPrompt:
        """The prompt that a chat completion goes on from.

        Raises:
            InvalidRequest: the messages cannot be rendered.
        """
        given: dict[str, Any] = {
            "enable_thinking": body.reasoning.enabled if body.enable_thinking is None else body.enable_thinking,
            "reasoning_effort": body.reasoning_effort or body.reasoning.effort,
            "verbosity": body.verbosity,
        }
        add_generation_prompt = body.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not body.continue_final_message
        prompt = self.conversation(
            body.messages,
            {name: value for name, value in given.items() if value is not None} | body.template_vars,
            tools=body.tools,
            functions=body.functions,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        return prompt._replace(text=prompt.text + (body.response_prefix or ""))

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        functions: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        path: str = "messages",
    ) -> RenderedPrompt:
        """A conversation as the template writes it, every message in its place.

        Args:
            variables: of the request; the model's defaults are below them, its forced ones above.
            path: of the messages in the request, for errors.
        """
        text = self.template.render(
            [_template_message(message, self.template, f"{path}.{index}") for index, message in enumerate(messages)],
            {
                **self._model.template_vars_default,
                **variables,
                **self._model.forced_template_variables(),
                "tools": tools,
                "functions": functions,
            },
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return RenderedPrompt(text, [], [])


def _template_message(message: ChatMessage, template: ChatTemplate, path: str) -> Message:
    role = message.role
    if role == "developer" and not template.knows_role(role):
        role = "system"  # what OpenAI renamed, under the name that older templates know
    fields: Message = {
        "role": role,
        "content": message.text(path),
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [_template_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
    }
    # Templates ask `message.content is string` or `is not none`; an assistant's calls without text are an empty text.
    return {name: value for name, value in fields.items() if value is not None} | {"content": fields["content"] or ""}


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    fields = {"id": call.id, "type": call.type}
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {name: value for name, value in fields.items() if value is not None} | {"function": function}


def _arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    """Arguments as the mapping that templates iterate over. What a model once botched shall not break the chat."""
    if not isinstance(given, str):
        return given
    if not given:
        return {}
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        value = given
    return value if isinstance(value, dict) else {"arguments": value}
