"""Messages of a request -> prompt text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from loguru import logger

from backends.messages import ControlToken
from common.boundaries import (
    MAX_BOUNDARIES,
    can_have_any,
    check_boundaries,
    sent_starts,
    starts_kept,
    starts_of,
    turning_points,
)
from common.config_models import ModelParameters
from common.control_text import StandIns
from common.conversations import SYSTEM_ROLES, Message, Place, Tool
from common.errors import InvalidRequest, check_characters
from common.generation import ImageInput
from common.parsing.detection import AnswerSyntax
from common.parsing.events import AnswerReader
from common.parsing.formats.base import ToolFormat
from common.prefixes import Answer, Outline, PrefixBreak, PrefixHistory, Turn, WrittenPrompt, digest_of
from common.sandbox import bounded
from common.splicing import with_thoughts, write_prompt
from common.templating import ChatTemplate, RenderedPrompt
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.message import ChatMessage
from endpoints.OAI.utils.control_tokens import ControlTokens
from endpoints.OAI.utils.images import NO_IMAGES, RequestImages
from endpoints.OAI.utils.messages import template_messages
from endpoints.OAI.utils.tools import ToolUse, tool_use

Later: TypeAlias = Callable[[Callable[[], None]], None]  # has something done that nobody waits for


def _now(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat completion.

    Attributes:
        rendered: its text.
        images: that the text shows.
        boundaries: as `cache_boundaries` of a `GenerationRequest`.
        given: characters at its end that the client wants the answer to begin with.
        tools: which the answer may call.
        broken: how it fails to go on from the turn before it in its conversation; None if it does.
        remember: to be called with each finished answer and the ids of its tokens, so that the next turn can go on
            from it.
    """

    rendered: RenderedPrompt
    images: list[ImageInput]
    boundaries: list[int]
    given: int
    tools: ToolUse
    broken: PrefixBreak | None
    remember: Callable[[AnswerReader, Collection[int]], None]

    @property
    def text(self) -> str:
        return self.rendered.text


class PromptWriter:
    """Turns the conversations of requests into prompts for one loaded model.

    Attributes:
        template: of the model.
        model: the settings that it was loaded with.
        syntax: how it writes its answers.

    Args:
        control_tokens: of its tokenizer.
        has_checkpoints: it has recurrent layers, so that boundaries in its prompts are of use.
        max_seq_len: tokens of a prompt and its answer. None: as many as there are.
        later: does what an answer leaves to do, in the thread in which prompts are written. Default: at once.
    """

    def __init__(
        self,
        template: ChatTemplate,
        model: ModelParameters,
        control_tokens: Sequence[ControlToken] = (),
        *,
        syntax: AnswerSyntax,
        has_checkpoints: bool = False,
        max_seq_len: int | None = None,
        later: Later = _now,
    ) -> None:
        self.template = template
        self.model = model
        self.syntax = syntax
        self._tokens = ControlTokens(template, control_tokens, syntax.tags or ())
        self._has_checkpoints = has_checkpoints
        self._max_seq_len = max_seq_len
        self._later = later
        self._history = PrefixHistory()

    def chat(self, body: ChatCompletionRequest, images: RequestImages = NO_IMAGES) -> ChatPrompt:
        """The prompt that a chat completion goes on from.

        Args:
            images: of its messages.

        Raises:
            InvalidRequest: the messages or the tools cannot be shown, or there is no message where the cache shall have
                a boundary.
            ContextLengthExceeded: the messages are too long for the model, whatever the template makes of them.
        """
        if self._max_seq_len is not None:
            check_characters(sum(message.characters for message in body.messages), self._max_seq_len, "messages")
        count = len(body.messages)
        check_boundaries(
            body.cache_boundaries or (), -count, count - 1, "the index of a message, or less than 0 from the end"
        )
        if body.continue_final_message and body.begins_answer:
            raise InvalidRequest(
                "continue_final_message ends the prompt inside the last message, add_generation_prompt after it; only "
                "one of them can be true.",
                param="continue_final_message",
            )
        tools = tool_use(body)
        hidden = tools.mode == "none" and self.model.exclude_tools_when_tool_choice_none
        with bounded(), _shallow("messages"):
            conversation = self._conversation(
                body.messages,
                _variables(body),
                tools=None if hidden else tools.declared,
                functions=None if hidden else [function.given for function in body.functions or ()],
                images=images,
            )
            return self._prompt(body, conversation, tools, images)

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        tools: list[Tool] | None = None,
        add_generation_prompt: bool = False,
        path: str = "messages",
    ) -> RenderedPrompt:
        """A conversation as the template writes it, every message in its place.

        Args:
            variables: of the request; the model's defaults are below them, its forced ones above.
            tools: as the client described them.
            path: of the messages in the request, for errors.
        """
        with bounded(), _shallow(path):
            conversation = self._conversation(messages, variables, tools=tools, path=path)
            return conversation.render(conversation.messages, add_generation_prompt=add_generation_prompt)

    def _conversation(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        tools: list[Tool] | None,
        functions: list[dict[str, Any]] | None = None,
        path: str = "messages",
        images: RequestImages = NO_IMAGES,
    ) -> _Conversation:
        template = self.template.variant(tools)
        forgeable = self.model.control_tokens_in_messages
        if not forgeable:
            self._tokens.check_roles(messages, path)
        return _Conversation(
            template=template,
            messages=self._in_form(messages, template, path, images),
            variables=self.model.template_variables(variables),
            tools=tools,
            functions=functions,
            form=self.syntax.form,
            tokens=None if forgeable else self._tokens,
            path=path,
        )

    def _in_form(
        self, messages: Sequence[ChatMessage], template: ChatTemplate, path: str, images: RequestImages = NO_IMAGES
    ) -> list[Message]:
        keep = self.model.keep_volatile_lines
        return template_messages(messages, template, path=path, keep_volatile_lines=keep, images=images)

    def _prompt(
        self, body: ChatCompletionRequest, conversation: _Conversation, tools: ToolUse, images: RequestImages
    ) -> ChatPrompt:
        messages = conversation.messages
        begun = messages[-1:] if body.continue_final_message else []  # the answer
        before = messages[: len(messages) - len(begun)]
        begun_text = "".join(message["content"] or "" for message in begun)
        prefix = _response_prefix(body)
        outline = Outline.of(before)
        returned = self._history.latest(before, outline)

        def render(part: Sequence[Message], *, whole: bool) -> RenderedPrompt:
            return conversation.render_as_asked(part, body) if whole else conversation.render(part)

        if returned is None:
            written = WrittenPrompt.by_template(render(messages, whole=True))
            known = {}
        else:
            before = with_thoughts(before, outline, returned)
            messages = [*before, *begun]
            written = write_prompt(messages, returned, render, self._tokens.all)
            known = starts_kept(returned.earlier.turn.written, written.plain)
        shown = images.shown_in(written.prompt.text)
        if self._has_checkpoints and (shown or can_have_any(written.plain)):  # images have many tokens
            starts = starts_of(messages, self._boundaries(body, messages, images), written.plain, render, known)
            written = written._replace(starts=starts)
        rendered = written.prompt._replace(text=written.prompt.text + prefix)
        inputs = {
            "tools": conversation.tools,
            "functions": conversation.functions or None,
            "response_prefix": body.response_prefix,
            **_variables(body),
        }
        turn = Turn.of(written._replace(prompt=rendered), before, inputs)

        @cache
        def base() -> bytes | None:
            if prefix.strip() not in ("", *(self.syntax.tags or ())):
                return None  # clients may or may not make it a part of the answer that they send back
            with suppress(InvalidRequest):
                return digest_of(conversation.render(before))
            return None

        def keep(answer: AnswerReader, token_ids: Collection[int]) -> None:
            # What is too deep to look at, as arguments of a model gone wild are, is left to the template next time.
            with suppress(InvalidRequest), _shallow("messages"):
                [message] = self._in_form([_as_returned(answer, begun_text)], conversation.template, "messages")
                spelled = [] if conversation.tokens is None else conversation.tokens.spelled(answer.text, token_ids)
                self._history.remember(turn, Answer(answer.text, spelled, message), base())

        def remember(answer: AnswerReader, token_ids: Collection[int]) -> None:
            self._later(partial(keep, answer, token_ids))

        broken = None if returned is None else self._history.check(turn, returned)
        given = len(begun_text) + len(prefix)
        return ChatPrompt(rendered, shown, sent_starts(written), given, tools, broken, remember)

    def _boundaries(
        self, body: ChatCompletionRequest, messages: Sequence[Message], images: RequestImages
    ) -> set[Place]:
        """Where checkpoints are wanted."""
        if body.cache_boundaries is None:
            indexes = turning_points(messages, self.model.recurrent_checkpoint_boundaries)
        else:
            indexes = _shown_at(body.cache_boundaries, body.messages, len(messages))
        marked = [*_ends_of_marked_parts(body.messages, len(messages), images)]
        return {*map(Place, indexes), *marked[-MAX_BOUNDARIES:]}


@dataclass(frozen=True)
class _Conversation:
    """A conversation that can be rendered in part, and as often as it takes.

    Attributes:
        messages: in the form in which the template gets them.
        functions: tools in the way before `tools`; a variable of the template's.
        form: of calls, see `ChatTemplate.render()`.
        tokens: that must not be forged; None where they may.
        path: of the messages in the request, for errors.
    """

    template: ChatTemplate
    messages: list[Message]
    variables: Mapping[str, Any]
    tools: list[Tool] | None
    functions: list[dict[str, Any]] | None
    form: ToolFormat
    tokens: ControlTokens | None
    path: str

    def render_as_asked(self, messages: Sequence[Message], body: ChatCompletionRequest) -> RenderedPrompt:
        """With the end that a request wants."""
        return self.render(
            messages,
            add_generation_prompt=body.begins_answer,
            continue_final_message=body.continue_final_message,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Some messages of the conversation, or all of them."""
        tools, legacy = self.tools, {"functions": self.functions} if self.functions else {}
        stand_ins = StandIns(messages, tools, legacy, self.variables, self.template.source)
        if self.tokens is not None:
            messages = self.tokens.hide_in_messages(messages, stand_ins)
            tools, legacy = self.tokens.hide((tools, legacy), stand_ins)
        rendering = self.template.render(
            messages,
            {**self.variables, **legacy},
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            form=self.form,
            path=self.path,
        )
        text, literals = stand_ins.reveal(rendering.text)
        return RenderedPrompt(text, literals, rendering.stop_strings)


@contextmanager
def _shallow(path: str) -> Iterator[None]:
    """Around what walks through the values of a request."""
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(f"The {path}, the tools or the variables are nested too deeply.", param=path) from error


def _shown_at(indexes: Sequence[int], messages: Sequence[ChatMessage], shown: int) -> set[int]:
    """Where some messages of a request are among the `shown` ones that the template gets."""
    places = {index % len(messages) for index in indexes}
    if shown < len(messages):  # the first system message was a volatile line and nothing else
        dropped = next(index for index, message in enumerate(messages) if message.role in SYSTEM_ROLES)
        places = {place - (place > dropped) for place in places}
    return {place for place in places if place < shown}


def _ends_of_marked_parts(messages: Sequence[ChatMessage], shown: int, images: RequestImages) -> Iterator[Place]:
    """Where what stands behind parts with a `cache_control` is among the `shown` messages that the template gets."""
    for index, message in enumerate(messages):
        marked = [place for place, part in enumerate(message.content or (), 1) if part.cache_control is not None]
        if not marked:
            continue
        texts = message.texts(f"messages.{index}", images)
        for end in marked:
            # As a whole, a system prompt is the same in all chats of a client.
            inside = message.role not in SYSTEM_ROLES and "".join(texts[end:]).strip()
            at, characters = (index, len("".join(texts[:end]))) if inside else (index + 1, 0)
            if at < len(messages):
                yield from (Place(place, characters) for place in _shown_at([at], messages, shown))


def _response_prefix(body: ChatCompletionRequest) -> str:
    if body.response_prefix and not (body.begins_answer or body.continue_final_message):
        logger.warning("A response_prefix was left out: the prompt does not end with the opening of an answer")
        return ""
    return body.response_prefix or ""


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """What a request sets for the template."""
    given = {"enable_thinking": body.thinks, "reasoning_effort": body.effort, "verbosity": body.verbosity}
    return {name: value for name, value in given.items() if value is not None} | body.template_vars


def _as_returned(answer: AnswerReader, begun: str) -> ChatMessage:
    """An answer as clients send it back."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    return ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": begun + answer.content,
            "reasoning_content": answer.reasoning or None,
            "tool_calls": calls or None,
        }
    )
