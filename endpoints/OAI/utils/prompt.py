"""Messages of a request -> prompt text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from loguru import logger

from backends.messages import ControlToken
from common.config_models import ModelParameters
from common.control_text import ControlStrings, StandIns
from common.conversations import Message, Tool
from common.errors import InvalidRequest
from common.prefixes import PrefixHistory, Turn
from common.templating import ChatTemplate, RenderedPrompt
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.message import ChatMessage
from endpoints.OAI.utils.messages import template_messages

T = TypeVar("T")

_ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython", "context", "documents"}
)


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
        self._guard = None if model.control_tokens_in_messages else _Guard(template, model, control_tokens)
        self._history = PrefixHistory((model.reasoning_start_token, model.reasoning_end_token))

    def chat(self, body: ChatCompletionRequest) -> RenderedPrompt:
        """The prompt that a chat completion goes on from.

        Raises:
            InvalidRequest: the messages cannot be rendered.
        """
        add_generation_prompt = body.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not body.continue_final_message
        elif add_generation_prompt and body.continue_final_message:
            raise InvalidRequest(
                "continue_final_message ends the prompt inside the last message, add_generation_prompt after it; only "
                "one of them can be true.",
                param="continue_final_message",
            )
        prompt = self.conversation(
            body.messages,
            _variables(body),
            tools=body.tools,
            functions=body.functions,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        if not body.response_prefix:
            return prompt
        if not (add_generation_prompt or body.continue_final_message):
            logger.warning("A response_prefix was left out: the prompt does not end with the opening of an answer")
            return prompt
        return prompt._replace(text=prompt.text + body.response_prefix)

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        tools: list[Tool] | None = None,
        functions: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        path: str = "messages",
    ) -> RenderedPrompt:
        """A conversation as the template writes it, every message in its place.

        Args:
            variables: of the request; the model's defaults are below them, its forced ones above.
            functions: tools in the way of old. They are shown as tools too, where there are none.
            path: of the messages in the request, for errors.
        """
        tools = tools or _as_tools(functions)
        legacy = {"functions": functions} if functions else {}
        given = {**self._model.template_vars_default, **variables, **self._model.forced_template_variables()}
        template = self.template.variant(tools)
        with _shallow(path):
            shown = self._messages(messages, template, path)
            stand_ins = StandIns(shown, tools, legacy, given, template.source)
            if self._guard is not None:
                shown = self._guard.hide_in_messages(shown, stand_ins)
                tools, legacy = self._guard.hide((tools, legacy), stand_ins)
            rendering = template.render(
                shown,
                {**given, **legacy},
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                path=path,
            )
        text, literals = stand_ins.reveal(rendering.text)
        return RenderedPrompt(text, literals, rendering.stop_strings)

    def follow(self, body: ChatCompletionRequest, prompt: str, *, quote: bool) -> Callable[[str], None]:
        """Say in the log where a prompt does not go on from the turn before it in its conversation.

        Args:
            prompt: the text that `chat()` made of the body.
            quote: show some characters of both prompts in the log.

        Returns:
            What to call with the text of each answer to the prompt, so that the next turn can be compared with it.
        """
        template = self.template.variant(body.tools or _as_tools(body.functions))
        inputs = {
            "tools": body.tools,
            "functions": body.functions,
            "response_prefix": body.response_prefix,
            **_variables(body),
        }
        with _shallow("messages"):
            messages = self._messages(body.messages, template, "messages")
            begun = messages.pop()["content"] if body.continue_final_message else ""
            turn = Turn.of(prompt, messages, inputs)
        if (broken := self._history.check(turn)) is not None:
            logger.info("{}", broken.describe(quote=quote))

        def remember(answer: str) -> None:
            self._history.remember(turn, answer, begun + answer)

        return remember

    def _messages(self, messages: Sequence[ChatMessage], template: ChatTemplate, path: str) -> list[Message]:
        if self._guard is not None:
            self._guard.check_roles(messages, path)
        return template_messages(messages, template, path=path, keep_volatile_lines=self._model.keep_volatile_lines)


@contextmanager
def _shallow(path: str) -> Iterator[None]:
    """Around what walks through the values of a request."""
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(f"The {path}, the tools or the variables are nested too deeply.", param=path) from error


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """What a request sets for the template."""
    given = {
        "enable_thinking": body.reasoning.enabled if body.enable_thinking is None else body.enable_thinking,
        "reasoning_effort": body.reasoning_effort or body.reasoning.effort,
        "verbosity": body.verbosity,
    }
    return {name: value for name, value in given.items() if value is not None} | body.template_vars


def _as_tools(functions: Sequence[dict[str, Any]] | None) -> list[Tool] | None:
    return [{"type": "function", "function": function} for function in functions or ()] or None


class _Guard:
    """Keeps what a request says from becoming control tokens.

    An assistant's messages keep the tokens that the tokenizer does not call special, and the tags of thoughts: they
    have to come back as the tokens that the model gave.
    """

    def __init__(self, template: ChatTemplate, model: ModelParameters, tokens: Sequence[ControlToken]) -> None:
        control = [token for token in tokens if _is_control(token, template)]
        thoughts = (model.reasoning_start_token, model.reasoning_end_token)
        self._all = ControlStrings([token.text for token in control])
        self._special = ControlStrings(
            [token.text for token in control if token.special and token.text not in thoughts]
        )
        # Templates make a token such as <|user|> of a role, so a role must not be called as another token is.
        names = {re.sub(r"^\W+|\W+$", "", token.text) for token in control}
        self._reserved = {name for name in names if name.lower() not in _ROLES}

    def check_roles(self, messages: Sequence[ChatMessage], path: str) -> None:
        for index, message in enumerate(messages):
            if message.role in self._reserved:
                raise InvalidRequest(
                    f"{path}.{index}.role {message.role!r} is the name of a control token of the model.",
                    param=f"{path}.{index}.role",
                )

    def hide(self, value: T, stand_ins: StandIns) -> T:
        hidden: T = stand_ins.hide(value, self._all)
        return hidden

    def hide_in_messages(self, messages: Sequence[Message], stand_ins: StandIns) -> list[Message]:
        return [
            stand_ins.hide(message, self._special if message["role"] == "assistant" else self._all)
            for message in messages
        ]


def _is_control(token: ControlToken, template: ChatTemplate) -> bool:
    """Tokenizers also hold runs of blanks and bits of markup that are text like any other, except to the tokenizer."""
    if token.text.isspace():
        return False
    return token.special or token.text.startswith("<|") or token.text in template.source
