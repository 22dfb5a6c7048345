"""Chat templates: found in or beside a model's folder, rendered as Hugging Face's tokenizers render them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from loguru import logger

from common.errors import InvalidRequest
from common.generation import TextSpan

TEMPLATE_DIR = Path(__file__).resolve().parent.parent / "templates"
SUFFIX = ".jinja"
# The blank at its end tells whether the template trims what it is given.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

Message: TypeAlias = dict[str, Any]  # as a template sees it: role, content and the rest, without null members


class RenderedPrompt(NamedTuple):
    """What a chat template made of a conversation."""

    text: str
    literals: list[TextSpan]  # where the text spells a control token because a message does; ordinary text
    stop_strings: list[str]  # that the template declares


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Models were trained on what transformers renders, so neither jinja2's HTML escapes nor its key order will do.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens that it may use.

    Attributes:
        name: file stem, or where the template was found.
        source: its text.
        special_tokens: `bos_token` and the like, as the model's tokenizer_config.json names them.

    Raises:
        jinja2.TemplateSyntaxError: from the constructor.
    """

    def __init__(self, name: str, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._template = _environment().from_string(source)

    def knows_role(self, role: str) -> bool:
        """Whether the template tells this role apart from others."""
        return role in self.source

    def begins_with_bos(self, prompt: str) -> bool:
        """Whether a rendered prompt brings its own BOS, so that the tokenizer must not add another."""
        bos = self.special_tokens.get("bos_token")
        return bool(bos) and prompt.startswith(bos or "")

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: in the order of the conversation, which is kept.
            variables: whatever else the template may read; the server's own names win over them.
            add_generation_prompt: end with the opening of an assistant's message.
            continue_final_message: end inside the last message, so that the model goes on with it.

        Raises:
            InvalidRequest: the template refused the messages, or the last one cannot be continued.
        """
        if not continue_final_message:
            return self._render(messages, variables, add_generation_prompt)
        text = _final_text(messages)
        marked: Message = {**messages[-1], "content": text + _CONTINUE_MARK}
        rendered = self._render([*messages[:-1], marked], variables, add_generation_prompt)
        return _cut_at_mark(rendered, text)

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None, add_generation_prompt: bool
    ) -> str:
        names = {
            **(variables or {}),
            **self.special_tokens,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except Exception as error:
            # A template is a program of the model's author: whatever it raises says that it cannot take this input.
            raise InvalidRequest(
                f"The chat template {self.name} could not render the messages: {error}", param="messages"
            ) from error


def _final_text(messages: Sequence[Message]) -> str:
    text = messages[-1].get("content") if messages else None
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue.", param="continue_final_message"
        )
    return text


def _cut_at_mark(rendered: str, text: str) -> str:
    before, mark, after = rendered.rpartition(_CONTINUE_MARK.rstrip())
    if not mark or text.strip() not in before:
        raise InvalidRequest(
            "continue_final_message cannot be used here: the chat template leaves out or changes the last message.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


# --- discovery ----------------------------------------------------------------------------------------------------


def find_template(
    model_directory: Path, prompt_template: str | None = None, template_dir: Path = TEMPLATE_DIR
) -> ChatTemplate | None:
    """The chat template of a model, or None where it has none.

    Looked for, first match wins: the one asked for by `prompt_template` (a file in `template_dir`, else the entry of
    that name in the model's tokenizer_config.json); then, in the model's folder, tabby_template.jinja,
    chat_template.jinja, chat_template.json and tokenizer_config.json. What cannot be read or compiled is skipped with a
    warning, unless it was asked for.

    Raises:
        InvalidRequest: there is no template `prompt_template`, or it does not compile.
    """
    config = _read_json(model_directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    if prompt_template:
        return _named_template(prompt_template, config, special_tokens, template_dir)
    for name, source in _candidates(model_directory, config):
        try:
            return ChatTemplate(name, source, special_tokens)
        except TemplateSyntaxError as error:
            logger.warning("The chat template {} is skipped: line {}: {}", name, error.lineno, error.message)
    return None


def list_templates(template_dir: Path = TEMPLATE_DIR) -> list[str]:
    """Names of the templates that `prompt_template` can ask for, whatever the model."""
    return sorted(path.stem for path in template_dir.glob(f"*{SUFFIX}"))


def _named_template(
    name: str, config: Mapping[str, Any], special_tokens: Mapping[str, str], template_dir: Path
) -> ChatTemplate:
    file_name = name if name.endswith(SUFFIX) else name + SUFFIX
    if Path(file_name).name != file_name:
        raise InvalidRequest(f"prompt_template {name!r} must be a name, not a path.", param="prompt_template")
    path = template_dir / file_name
    sources = dict(_configured_templates(config))
    source = _read_source(path) or sources.get(name)
    if source is None:
        choices = ", ".join([*list_templates(template_dir), *sources])
        raise InvalidRequest(
            f"There is no chat template {name!r} in the templates folder or in the model's tokenizer_config.json. "
            f"Available: {choices}.",
            param="prompt_template",
        )
    try:
        return ChatTemplate(file_name.removesuffix(SUFFIX), source, special_tokens)
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"The chat template {name!r} does not compile: line {error.lineno}: {error.message}",
            param="prompt_template",
        ) from error


def _candidates(model_directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for stem in ("tabby_template", "chat_template"):
        if source := _read_source(model_directory / (stem + SUFFIX)):
            yield stem, source
    source = _read_json(model_directory / "chat_template.json").get("chat_template")
    if isinstance(source, str):
        yield "chat_template", source
    yield from _configured_templates(config)


def _read_source(path: Path) -> str | None:
    """The text of a template; None, and a warning where that is a surprise, if there is none to be had."""
    if not os.path.isfile(path):  # unlike Path.is_file() also false for a name that is too long
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("The chat template {} is skipped: {}", path.name, error)
        return None


def _configured_templates(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = config.get("chat_template")
    if isinstance(found, str):
        yield "from_tokenizer_config", found
    elif isinstance(found, list):
        for entry in found:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                yield str(entry.get("name", "default")), entry["template"]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[key] = content
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        logger.warning("{} is skipped: {}", path.name, error)
        return {}
    return value if isinstance(value, dict) else {}
