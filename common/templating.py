"""Chat templates: found in or beside a model's folder, rendered as Hugging Face's tokenizers render them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from jinja2 import Template, TemplateSyntaxError
from loguru import logger

from common import conversations
from common.conversations import Message, Tool
from common.errors import InvalidRequest
from common.generation import TextSpan
from common.limits import MAX_CONFIG_BYTES
from common.names import is_plain_name
from common.parsing.formats.base import ToolFormat
from common.parsing.formats.registry import default_format
from common.sandbox import MAX_SOURCE, TemplateLimitExceeded, bounded, compile_template, run_template

TEMPLATE_DIR = Path(__file__).resolve().parent.parent / "templates"
SUFFIX = ".jinja"
# The blank at its end tells whether the template trims what it is given.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_MOST_TOLD = 1000  # characters of what a template says
# Names that thoughts go by, the one that most templates read first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What of a model's list of templates is for requests with tools, and for all others.
_TOOL_TEMPLATE, _DEFAULT_TEMPLATE = "tool_use", "default"


class RenderedPrompt(NamedTuple):
    """What a chat template made of a conversation."""

    text: str
    literals: list[TextSpan]  # where the text spells a control token because a message does; ordinary text
    stop_strings: list[str]  # that the template declares


class Rendering(NamedTuple):
    text: str
    stop_strings: list[str]  # that the template declares


class TemplateTraits(NamedTuple):
    """What a template shows of a conversation, and in which form. The defaults are what all of them should do.

    Attributes:
        system: which system messages it shows where they stand, rather than nowhere or at another's place.
        typed_content: it reads a message's content as a list of parts, and nothing from a text.
        shows_tools: it describes the tools of a request in some form.
        shows_calls: it writes calls of tools in some form. Where it does not, they are written into the text of their
            message, with the arguments as they are.
        null_content: it does so only where the content beside them is null.
        text_arguments: it writes the arguments of a call as they are, so that they have to be JSON text already.
        mapping_arguments: it fails on arguments that are no mapping.
        short_ids: it insists on ids of nine letters and digits, as those of Mistral's models do.
    """

    system: Literal["all", "first", "none"] = "all"
    typed_content: bool = False
    shows_tools: bool = True
    shows_calls: bool = True
    null_content: bool = False
    text_arguments: bool = False
    mapping_arguments: bool = False
    short_ids: bool = False


# --- a template ---------------------------------------------------------------------------------------------------


class ChatTemplate:
    """A compiled template and the special tokens that it may use.

    Attributes:
        name: file stem, or where the template was found.
        source: its text.
        special_tokens: `bos_token` and the like, as the model's tokenizer names them.

    Args:
        for_tools: what the model has for requests with tools instead of this one.

    Raises:
        jinja2.TemplateSyntaxError: from the constructor.
    """

    def __init__(
        self,
        name: str,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._for_tools = for_tools
        self._template = compile_template(source)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Found out by rendering small conversations, once."""
        with bounded():
            return _Probe(self._template, self.special_tokens).traits()

    def variant(self, tools: Sequence[Tool] | None) -> ChatTemplate:
        """The template for a request with these tools."""
        return self._for_tools if tools and self._for_tools else self

    def knows_role(self, role: str) -> bool:
        """Whether the template tells this role apart from others."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def begins_with_bos(self, prompt: str, literals: Sequence[TextSpan] = ()) -> bool:
        """Whether a rendered prompt brings its own BOS, so that the tokenizer must not add another."""
        bos = self.special_tokens.get("bos_token")
        return bool(bos) and prompt.startswith(bos or "") and not (literals and literals[0][0] == 0)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        form: ToolFormat | None = None,
        path: str = "messages",
    ) -> Rendering:
        """The prompt for a conversation.

        What the template would leave out, or refuses, is given to it in another of the shapes of
        `common.conversations`, in which everything stays in its place.

        Args:
            messages: in the order of the conversation, which is kept.
            variables: whatever else the template may read; the server's own names win over them.
            tools: as the client described them.
            add_generation_prompt: end with the opening of an assistant's message.
            continue_final_message: end inside the last message, so that the model goes on with it.
            form: of calls of tools that the template does not write itself, and that it does not tell the model of;
                the default one unless given.
            path: of the messages in the request, for errors.

        Raises:
            InvalidRequest: the template refused the messages, or was stopped, or the last one cannot be continued.
        """
        form = form or default_format()
        messages = self._shown(messages, tools, form)
        names = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return self._render_some_shape(messages, tools, names, form, path)
        text = _final_text(messages)
        rendering = self._render_some_shape([*messages[:-1], _marked(messages[-1])], tools, names, form, path)
        return rendering._replace(text=_cut_at_mark(rendering.text, text))

    def render_as_given(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, tools: Sequence[Tool] | None = None
    ) -> Rendering:
        """The conversation in no shape but its own, byte for byte as transformers renders it.

        A template is a program of the model's author: whatever it raises says that it cannot take this input.
        """
        return _render(self._template, {**variables, **self.special_tokens, "messages": messages, "tools": tools})

    def _shown(self, messages: Sequence[Message], tools: Sequence[Tool] | None, form: ToolFormat) -> list[Message]:
        """The conversation in a shape of which the template leaves nothing out."""
        traits, shown = self.traits, list(messages)
        if tools and not traits.shows_tools:
            shown = conversations.with_tools_text(shown, tools, form)
        if traits.system == "first":
            shown = conversations.later_system_as_user(conversations.join_system(shown))
        elif traits.system == "none":
            shown = conversations.system_as_user(shown)
        if not traits.shows_calls:
            shown = conversations.calls_as_text(shown, form)
        elif traits.null_content:
            shown = conversations.text_before_calls(shown)
        return conversations.with_parts(shown) if traits.typed_content else shown

    def _render_some_shape(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        names: Mapping[str, Any],
        form: ToolFormat,
        path: str,
    ) -> Rendering:
        with self._stopped_at(path):
            try:
                return self.render_as_given(messages, names, tools=tools)
            except TemplateLimitExceeded:
                raise
            except Exception as error:
                refusal = error  # what the template says of the conversation as it came is what counts
            for shape in conversations.other_shapes(messages, tools, form):
                try:
                    rendering = self.render_as_given(shape.messages, names, tools=shape.tools)
                except TemplateLimitExceeded:
                    raise
                except Exception:
                    continue
                logger.debug("The chat template {} takes the conversation with {}", self.name, shape.description)
                return rendering
            raise InvalidRequest(
                f"The chat template {self.name} could not render the messages: {str(refusal)[:_MOST_TOLD]}", param=path
            ) from refusal

    @contextmanager
    def _stopped_at(self, path: str) -> Iterator[None]:
        """Bounds what is rendered within; a template that goes beyond them cannot render what is at the path."""
        try:
            with bounded():
                yield
        except TemplateLimitExceeded as error:
            raise InvalidRequest(
                f"The chat template {self.name} was stopped: {error}. Send fewer or shorter messages, or use another "
                "template.",
                param=path,
            ) from error


def _render(template: Template, names: Mapping[str, Any]) -> Rendering:
    messages = [_with_reasoning(message) for message in names["messages"]]
    text, exported = run_template(template, {"documents": None, **names, "messages": messages})
    return Rendering(_valid_text(text), _strings(exported.get("stop_strings")))


def _with_reasoning(message: Message) -> Message:
    """A thought under all the names that templates read it by."""
    for name in _REASONING_FIELDS:
        if (thought := message.get(name)) is not None:
            return {"thinking": thought, **message, "reasoning_content": thought}
    return message


def _valid_text(text: str) -> str:
    """Half a surrogate pair, which JSON in the arguments of a call can express, becomes a question mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


def _strings(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    return [item for item in values if isinstance(item, str) and item] if isinstance(values, (list, tuple)) else []


# --- going on with the last message -------------------------------------------------------------------------------


def _final_text(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue.", param="continue_final_message"
        )
    return content


def _marked(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]}


def _cut_at_mark(rendered: str, text: str) -> str:
    before, mark, after = rendered.rpartition(_CONTINUE_MARK.rstrip())
    if not mark or text.strip() not in before:
        raise InvalidRequest(
            "continue_final_message cannot be used here: the chat template leaves out or changes the last message.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


# --- traits -------------------------------------------------------------------------------------------------------

_WORDS: Final = ("PROBED", "SECOND", "THIRD", "FOURTH")
_KEY: Final = "probe_key"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef", "abcdefgh1"
_TOOL: Final[Tool] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
# How calls may be written, the least unusual first.
_CALL_FORMS: Final = (
    TemplateTraits(),
    TemplateTraits(short_ids=True),
    TemplateTraits(text_arguments=True),
    TemplateTraits(text_arguments=True, short_ids=True),
    TemplateTraits(null_content=True),
    TemplateTraits(null_content=True, text_arguments=True),
)


class _Probe:
    """Finds the traits of a template out by rendering small conversations."""

    def __init__(self, template: Template, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._names = {**special_tokens, "add_generation_prompt": False}
        self._typed = False

    def traits(self) -> TemplateTraits:
        as_text = self._rendered(_said("user", _WORDS[0]))
        self._typed = _WORDS[0] not in as_text
        self._typed = self._typed and _WORDS[0] in self._rendered(_said("user", _WORDS[0]))
        return self._call_form()._replace(
            system=self._system(), typed_content=self._typed, shows_tools=self._shows_tools()
        )

    def _system(self) -> Literal["all", "first", "none"]:
        roles = ("system", "user", "system", "user")
        conversation = list(map(_said, roles, _WORDS))
        text, later = self._rendered(*conversation), self._rendered(*conversation[1:])
        # A template that refuses says so when it comes to that.
        shows_all = not text or _in_order(text, _WORDS)
        begins_so = not later or later.startswith(_up_to(_WORDS[1], self._rendered(conversation[1])))
        if shows_all and begins_so:
            return "all"
        text = self._rendered(*conversation[:2])
        return "first" if not text or _in_order(text, _WORDS[:2]) else "none"

    def _shows_tools(self) -> bool:
        text = self._rendered(_said("user", _WORDS[0]), tools=[_TOOL])
        return not text or _TOOL["function"]["name"] in text  # one that refuses says so when it comes to that

    def _call_form(self) -> TemplateTraits:
        for tools in (None, [_TOOL]):
            for form in _CALL_FORMS:
                arguments = {_KEY: _WORDS[0]}
                if self._shows_call(form, json.dumps(arguments) if form.text_arguments else arguments, tools):
                    return form._replace(mapping_arguments=not self._shows_call(form, _WORDS[0], tools))
        return TemplateTraits(shows_calls=False, text_arguments=True)

    def _shows_call(self, form: TemplateTraits, arguments: object, tools: list[Tool] | None) -> bool:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": _SHORT_ID if form.short_ids else _LONG_ID, "type": "function", "function": function}
        calling = _said("assistant", "") | {"tool_calls": [call]}
        if form.null_content:
            calling["content"] = None
        text = self._rendered(_said("user", "hi"), calling, tools=tools)
        return _WORDS[0] in text and f"'{_KEY}'" not in text  # a mapping that is written as it is looks like Python

    def _rendered(self, *messages: Message, tools: list[Tool] | None = None) -> str:
        """The text; none where the template fails."""
        shown = conversations.with_parts(messages) if self._typed else messages
        try:
            return _render(self._template, {**self._names, "messages": shown, "tools": tools}).text
        except Exception:  # whatever it is, it means that this form will not do
            return ""


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _up_to(word: str, text: str) -> str:
    before, found, _ = text.rpartition(word)
    return before + found


def _in_order(text: str, words: Sequence[str]) -> bool:
    positions = [text.find(word) for word in words]
    return -1 not in positions and positions == sorted(positions)


# --- discovery ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    name: str
    text: str
    for_tools: str | None = None  # text of the model's template for requests with tools

    def compile(self, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Raises jinja2.TemplateSyntaxError."""
        for_tools = None
        if self.for_tools is not None:
            for_tools = ChatTemplate(_TOOL_TEMPLATE, self.for_tools, special_tokens)
        return ChatTemplate(self.name, self.text, special_tokens, for_tools)


def find_template(
    model_directory: Path, prompt_template: str | None = None, template_dir: Path = TEMPLATE_DIR
) -> ChatTemplate | None:
    """The chat template of a model, or None where it has none.

    Looked for, first match wins: the one asked for by `prompt_template` (a file in `template_dir`, else one that the
    model has under that name, in additional_chat_templates/ or in its tokenizer_config.json); then, in the model's
    folder, tabby_template.jinja, chat_template.jinja, chat_template.json and tokenizer_config.json; then the file in
    `template_dir` whose name is part of the name of the model's folder, the longest if there are several. What cannot
    be read or compiled is skipped with a warning, unless it was asked for.

    Raises:
        InvalidRequest: there is no template `prompt_template`, or it does not compile.
    """
    config = _read_json(model_directory / "tokenizer_config.json")
    special_tokens = _special_tokens(model_directory, config)
    if prompt_template:
        own = _configured_templates(config) | _additional_templates(model_directory)
        return _named_template(prompt_template, own, special_tokens, template_dir)
    for source in _candidates(model_directory, config, template_dir):
        try:
            return source.compile(special_tokens)
        except TemplateSyntaxError as error:
            logger.warning("The chat template {} is skipped: line {}: {}", source.name, error.lineno, error.message)
    return None


def list_templates(template_dir: Path = TEMPLATE_DIR) -> list[str]:
    """Names of the templates that `prompt_template` can ask for, whatever the model."""
    return sorted(path.name.removesuffix(SUFFIX) for path in template_dir.glob(f"*{SUFFIX}"))


def _named_template(
    name: str, own: Mapping[str, str], special_tokens: Mapping[str, str], template_dir: Path
) -> ChatTemplate:
    file_name = name if name.endswith(SUFFIX) else name + SUFFIX
    if not is_plain_name(file_name):
        raise InvalidRequest(f"prompt_template {name!r} must be a name, not a path.", param="prompt_template")
    source = _read_source(template_dir / file_name) or own.get(name)
    if source is None:
        choices = ", ".join([*list_templates(template_dir), *own])
        raise InvalidRequest(
            f"There is no chat template {name!r} in the templates folder or in the model's own. Available: {choices}.",
            param="prompt_template",
        )
    try:
        return ChatTemplate(file_name.removesuffix(SUFFIX), source, special_tokens)
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"The chat template {name!r} does not compile: line {error.lineno}: {error.message}",
            param="prompt_template",
        ) from error


def _candidates(model_directory: Path, config: Mapping[str, Any], template_dir: Path) -> Iterator[_Source]:
    if text := _read_source(model_directory / f"tabby_template{SUFFIX}"):
        yield _Source("tabby_template", text)
    if text := _read_source(model_directory / f"chat_template{SUFFIX}"):
        yield _Source("chat_template", text, _additional_templates(model_directory).get(_TOOL_TEMPLATE))
    text = _read_json(model_directory / "chat_template.json").get("chat_template")
    if isinstance(text, str):
        yield _Source("chat_template", text)
    if configured := _configured_templates(config):
        name = _DEFAULT_TEMPLATE if _DEFAULT_TEMPLATE in configured else next(iter(configured))
        yield _Source(name, configured[name], configured.get(_TOOL_TEMPLATE))
    model_name = model_directory.name.lower()
    for stem in sorted(list_templates(template_dir), key=len, reverse=True):
        if stem.lower() in model_name and (text := _read_source(template_dir / (stem + SUFFIX))):
            yield _Source(stem, text)


def _read_source(path: Path) -> str | None:
    """The text of a template; None, and a warning where that is a surprise, if there is none to be had."""
    if not os.path.isfile(path):  # unlike Path.is_file() also false for a name that is too long
        return None
    try:
        if path.stat().st_size > MAX_SOURCE * 4:  # what UTF-8 needs at most
            logger.warning("The chat template {} is skipped: it is larger than {:,} bytes", path.name, MAX_SOURCE * 4)
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("The chat template {} is skipped: {}", path.name, error)
        return None


def _configured_templates(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"from_tokenizer_config": found}
    return {
        str(entry.get("name", _DEFAULT_TEMPLATE)): entry["template"]
        for entry in (found if isinstance(found, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _additional_templates(model_directory: Path) -> dict[str, str]:
    """Where transformers now writes a list of templates to."""
    paths = sorted(model_directory.glob(f"additional_chat_templates/*{SUFFIX}"))
    texts = {path.name.removesuffix(SUFFIX): _read_source(path) for path in paths}
    return {name: text for name, text in texts.items() if text}


def _special_tokens(model_directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of the special tokens, from where transformers takes them."""
    merged = dict(config)
    if "added_tokens_decoder" not in config:
        merged |= _read_json(model_directory / "special_tokens_map.json")
    named = {key: value for key, value in merged.items() if key.endswith("_token")}
    if isinstance(extra := merged.get("extra_special_tokens"), dict):
        named |= extra
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES // 1_000_000} MB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("{} is skipped: {}", path.name, error)
        return {}
    return value if isinstance(value, dict) else {}
