"""Which dialect and which tool format a model speaks: from its settings, its chat template and its special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, Literal, NamedTuple, TypeAlias

from loguru import logger

from common.config_models import ModelParameters
from common.errors import InvalidRequest
from common.parsing.dialect import Dialect
from common.parsing.evidence import KNOWN_TAGS, SAMPLE_CALL, Evidence, ThoughtTags
from common.parsing.formats.base import ToolFormat
from common.parsing.formats.registry import FORMATS, default_format, format_named
from common.parsing.glimmer import GlimmerDialect
from common.parsing.harmony import HarmonyDialect
from common.parsing.tags import TagDialect
from common.templating import ChatTemplate

# "set": by a setting; "certain": the template wrote a sample that the format read back; "likely": the template or the
# vocabulary holds its marks; "unknown": nothing points to any.
Certainty: TypeAlias = Literal["set", "certain", "likely", "unknown"]


class Finding(NamedTuple):
    """What was found, how sure that is, and by what, as a clause for the log and the model card."""

    value: str | None
    certainty: Certainty
    reason: str

    @property
    def source(self) -> str:
        return f"{self.certainty}: {self.reason}"


class AnswerSyntax(NamedTuple):
    """How a loaded model writes its answers.

    Attributes:
        tags: that begin and end a thought, where the dialect is that of tags and the model has any.
        form: of the calls that the chat template does not write itself; see `ChatTemplate.render()`.
        tool_format: name of the format.
        thoughts: what marks them, such as "<think> ... </think>".
    """

    dialect: Dialect
    tags: ThoughtTags | None
    form: ToolFormat
    tool_format: Finding
    thoughts: Finding


def check_settings(model: ModelParameters) -> None:
    """Raises `InvalidRequest` where `tool_format` names no format."""
    names = tool_format_names()
    if model.tool_format is not None and model.tool_format not in names:
        raise InvalidRequest(
            f"There is no tool_format {model.tool_format!r}. Available: {', '.join(names)}.", param="tool_format"
        )


def tool_format_names() -> list[str]:
    """The values of the setting `tool_format`."""
    return [name for format in FORMATS for name in format.names] + [name for kind in _CHANNELS for name in kind.names]


def detect(template: ChatTemplate | None, control_tokens: Collection[str], model: ModelParameters) -> AnswerSyntax:
    """
    Args:
        template: None: there is no prompt to go by.
        control_tokens: texts that the tokenizer turns into one token each.

    Raises:
        InvalidRequest: a setting names no format.
    """
    check_settings(model)
    evidence = Evidence(template, frozenset(control_tokens))
    for kind in _CHANNELS:
        if (found := _find_channels(kind, evidence, model)) is not None:
            _warn_of_settings_without_effect(kind, model)
            return AnswerSyntax(
                kind.dialect(), None, default_format(), found, found._replace(value=" ... ".join(kind.thoughts))
            )
    format, tool_format = _find_format(evidence, model)
    tags, thoughts = _find_tags(evidence, model)
    dialect = TagDialect(tags, _formats_to_try(format))
    return AnswerSyntax(dialect, tags, format or default_format(), tool_format, thoughts)


# --- dialects of channels -----------------------------------------------------------------------------------------


class _Channels(NamedTuple):
    """A dialect in which an answer is a series of messages, each with a header that says whom it is for.

    Attributes:
        names: values of `tool_format` that mean it; the first one is also the name of the setting for it.
        tokens: that models which speak it have.
        thoughts: what stands before and after one.
    """

    names: tuple[str, ...]
    dialect: Callable[[], Dialect]
    tokens: tuple[str, ...]
    thoughts: ThoughtTags


_CHANNELS: Final = (
    _Channels(
        ("harmony",),
        HarmonyDialect,
        ("<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    _Channels(
        ("muse_glimmer", "glimmer"),
        GlimmerDialect,
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        ("to=self<|message|>", "<|eom|>"),
    ),
)


def _find_channels(kind: _Channels, evidence: Evidence, model: ModelParameters) -> Finding | None:
    """Why a model speaks a dialect of channels; None if it does not."""
    name = kind.names[0]
    wanted: bool | None = getattr(model, name)
    if wanted is False:
        if model.tool_format in kind.names:
            logger.warning("tool_format: {} has no effect beside {}: false", model.tool_format, name)
        return None
    if wanted:
        return Finding(name, "set", f"{name} is true")
    if model.tool_format is not None:
        return Finding(name, "set", "tool_format is set") if model.tool_format in kind.names else None
    if evidence.reads_back(kind.dialect()) is not None:
        return Finding(name, "certain", _WRITTEN)
    if evidence.written is not None:
        return None
    if evidence.tokens.issuperset(kind.tokens):
        return Finding(name, "likely", _IN_VOCABULARY)
    return Finding(name, "likely", _IN_SOURCE) if all(token in evidence.source for token in kind.tokens) else None


def _warn_of_settings_without_effect(kind: _Channels, model: ModelParameters) -> None:
    settings = {
        "tool_format": model.tool_format is not None and model.tool_format not in kind.names,
        "reasoning_start_token and reasoning_end_token": model.chosen_reasoning_tags is not None,
        "reasoning_mode": model.effective_reasoning_mode == "off",
    }
    for name, is_set in settings.items():
        if is_set:
            logger.warning("{} has no effect: the model speaks {}", name, kind.names[0])


# --- tool formats -------------------------------------------------------------------------------------------------

_WRITTEN: Final = "the chat template writes it"
_AMONG_OTHERS: Final = "the chat template writes it, with other marks around it"
_IN_SOURCE: Final = "the chat template holds its marks"
_IN_VOCABULARY: Final = "the tokenizer has its marks as tokens"
_NOTHING: Final = "neither the chat template nor the tokenizer points to any"


def _find_format(evidence: Evidence, model: ModelParameters) -> tuple[ToolFormat | None, Finding]:
    if model.tool_format is not None and (format := format_named(model.tool_format)) is not None:
        return format, Finding(model.tool_format, "set", "tool_format is set")
    if evidence.written is not None:
        format, among_others = evidence.written
        name = format.names[0]
        return format, Finding(name, "likely", _AMONG_OTHERS) if among_others else Finding(name, "certain", _WRITTEN)
    if evidence.writes_calls:
        return None, Finding(None, "unknown", "the chat template writes calls in a form that is not known")
    if (format := _best_marked(evidence.source)) is not None:
        return format, Finding(format.names[0], "likely", _IN_SOURCE)
    if (format := _best_marked(evidence.tokens)) is not None:
        return format, Finding(format.names[0], "likely", _IN_VOCABULARY)
    return None, Finding(None, "unknown", _NOTHING)


_MARK = re.compile(r'<[^\s<>="]+[=>]?|\[[A-Z_]+\]')


def _best_marked(found_in: Collection[str]) -> ToolFormat | None:
    """The format most of whose marks are found, the first of them in any case.

    Args:
        found_in: a text, or a set of tokens.
    """
    best, best_share = None, (0.0, 0)
    for format in FORMATS:
        marks = list(dict.fromkeys(_MARK.findall(format.write([SAMPLE_CALL])))) if format.trigger else []
        found = sum(mark in found_in for mark in marks)
        if marks and marks[0] in found_in and (share := (found / len(marks), found)) > best_share:
            best, best_share = format, share
    return best


def _formats_to_try(own: ToolFormat | None) -> list[ToolFormat]:
    """The model's own first, then those that begin alike. Where it is not known: all that text is not taken for."""
    first = own or default_format()
    others = [format for format in FORMATS if format is not first]
    if own is None:
        return [first, *(format for format in others if format.trigger)]
    return [first, *(format for format in others if not set(first.starts).isdisjoint(format.starts))]


# --- thoughts -----------------------------------------------------------------------------------------------------


def _find_tags(evidence: Evidence, model: ModelParameters) -> tuple[ThoughtTags | None, Finding]:
    mode = model.effective_reasoning_mode
    if mode == "off":
        return None, Finding(None, "set", "reasoning_mode is off")
    tags, certainty, reason = _search_tags(evidence, model)
    if tags is None and mode == "on":
        tags = (model.reasoning_start_token, model.reasoning_end_token)
        certainty, reason = "set", "reasoning_mode is on, and nothing points to other tags"
    return tags, Finding(" ... ".join(tags) if tags else None, certainty, reason)


def _search_tags(evidence: Evidence, model: ModelParameters) -> tuple[ThoughtTags | None, Certainty, str]:
    if (tags := model.chosen_reasoning_tags) is not None:
        return tags, "set", "reasoning_start_token and reasoning_end_token are set"
    if (tags := evidence.tags_around_thought()) is not None:
        return tags, "certain", _WRITTEN
    if (tags := evidence.tags_in_beginning()) is not None:
        return tags, "certain", "the chat template begins answers with it"
    if (tags := _first(lambda tags: tags[0] in evidence.source and tags[1] in evidence.source)) is not None:
        return tags, "likely", _IN_SOURCE
    if (tags := _first(lambda tags: tags[1] in evidence.source)) is not None:  # where earlier thoughts are cut off
        return tags, "likely", _IN_SOURCE
    if (tags := _first(lambda tags: evidence.tokens.issuperset(tags))) is not None:
        return tags, "likely", _IN_VOCABULARY
    return None, "unknown", _NOTHING


def _first(condition: Callable[[ThoughtTags], bool]) -> ThoughtTags | None:
    return next(filter(condition, KNOWN_TAGS), None)
