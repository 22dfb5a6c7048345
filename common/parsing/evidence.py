"""What there is to tell a model's syntax by: its chat template, made to write small conversations, and its tokens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from common.conversations import Message, with_parts
from common.parsing.answer import AnswerParser
from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.formats.base import Call, Tool, ToolFormat, Tools
from common.parsing.formats.registry import FORMATS
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, Content
from common.parsing.tags import TagDialect
from common.templating import ChatTemplate

ThoughtTags: TypeAlias = tuple[str, str]

# Tags of published models, to be found in a template or a vocabulary. Around a thought that a template writes, pairs
# such as <x> ... </x> and [X] ... [/X] are found without a row here.
KNOWN_TAGS: Final[tuple[ThoughtTags, ...]] = (
    ("<think>", "</think>"),
    ("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<longcat_think>", "</longcat_think>"),  # LongCat-Flash-Thinking
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),  # Reka Flash
)
_OPENING = re.compile(r"(<[^\s<>/|]+>|\[[^\s\[\]/|]+\])\Z")

_NAME: Final = "probe_tool"
_TEXT: Final = "PROBED"
_ARGUMENTS: Final = {"probe_text": _TEXT, "probe_count": 7}
_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "probe_text": {"type": "string", "description": "a text"},
        "probe_count": {"type": "integer", "description": "a number"},
    },
    "required": ["probe_text", "probe_count"],
}
SAMPLE_CALL: Final = Call(_NAME, json.dumps(_ARGUMENTS))
_TOOLS: Final = Tools([Tool(_NAME, _PARAMETERS)])
_DECLARED: Final = [
    {"type": "function", "function": {"name": _NAME, "description": "A probe.", "parameters": _PARAMETERS}}
]
_IDS: Final = ("call_0123456789abcdef", "abcdefgh1", f"functions.{_NAME}:0")  # OpenAI's, Mistral's, Kimi's
_QUESTION: Final[Message] = {"role": "user", "content": "QUESTION"}
_ANSWER, _THOUGHT = "ANSWERED", "PONDERED"
# What templates ask before they write or begin a thought.
_THINKING: Final = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}


class _Rest(NamedTuple):
    """What of a text with a call in it is not part of the call. The less, the better was it read.

    Attributes:
        has_marks: there is something before the call that does not stand before other answers.
    """

    has_marks: bool
    characters: int


class Evidence:
    """What there is to tell a model's syntax by.

    Attributes:
        source: of the chat template.
        tokens: that stand for one string each.
        writes_calls: the template does, in whatever form.
        written: the format in which it does, and whether there are other marks around it; None if in no known one.
    """

    def __init__(self, template: ChatTemplate | None, tokens: frozenset[str]) -> None:
        variants = [] if template is None else [template, template.variant(_DECLARED)]
        self.tokens = tokens
        self.source = "\n".join(dict.fromkeys(variant.source for variant in variants))
        self._plain = variants[0] if variants else None
        self._calls = list(dict.fromkeys(_written_calls(variants[1]))) if variants else []
        self._turns = _squeezed("".join(_written_turns(variants[1]))) if variants else ""
        self.writes_calls = any(_TEXT in text for text in self._calls)
        self.written = self._find_format()

    def reads_back(self, dialect: Dialect) -> _Rest | None:
        """What a dialect leaves over of the call that the template wrote; None if it finds no such call."""
        rests = [rest for text in self._calls if (rest := self._rest(dialect, text)) is not None]
        return min(rests, default=None)

    def _rest(self, dialect: Dialect, text: str) -> _Rest | None:
        parser = AnswerParser(dialect, ReadOptions(_TOOLS))
        pieces = [*parser.feed(text), *parser.end("complete")]
        names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
        ends = [piece.complete for piece in pieces if isinstance(piece, CallEnd)]
        if (names, ends) != ([_NAME], [True]):
            return None
        arguments = json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments)))
        if arguments != _ARGUMENTS:
            return None
        rest = [_squeezed(piece.text) for piece in pieces if isinstance(piece, Content)]
        before = rest[0] if rest and isinstance(pieces[0], Content) else ""
        for tag in itertools.chain(*KNOWN_TAGS):
            before = before.replace(tag, "")
        return _Rest(before not in self._turns, sum(map(len, rest)))

    def _find_format(self) -> tuple[ToolFormat, bool] | None:
        found: list[tuple[_Rest, bool, int]] = []
        for index, format in enumerate(FORMATS):
            rest = self.reads_back(TagDialect(None, [format]))
            if rest is not None and (format.trigger or not rest.has_marks):
                written = _squeezed(format.write([SAMPLE_CALL]))
                found.append((rest, not any(written in _squeezed(text) for text in self._calls), index))
        if not found:
            return None
        rest, _, index = min(found)
        return FORMATS[index], rest.has_marks

    def tags_around_thought(self) -> ThoughtTags | None:
        """Those with which the template writes a thought."""
        for text in _written_thoughts(self._plain) if self._plain else ():
            before, _, after = text.partition(_THOUGHT)
            if (tags := _tags_around(before, after)) is not None:
                return tags
        return None

    def tags_in_beginning(self) -> ThoughtTags | None:
        """Those of a thought that the template begins for the model, or closes at once."""
        for begun in _begun(self._plain) if self._plain else ():
            for tags in KNOWN_TAGS:
                if begun.endswith(tags):
                    return tags
        return None


def _tags_around(before: str, after: str) -> ThoughtTags | None:
    """The tags with which a text before a thought ends and one after it begins."""
    before, after = before.rstrip(), after.lstrip()
    for tags in KNOWN_TAGS:
        if before.endswith(tags[0]) and after.startswith(tags[1]):
            return tags
    opening = _OPENING.search(before)
    if opening is None:
        return None
    closing = f"{opening.group()[0]}/{opening.group()[1:]}"
    return (opening.group(), closing) if after.startswith(closing) else None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _written_calls(template: ChatTemplate) -> Iterator[str]:
    """What a template writes for an answer that calls a tool, without the rest of the turn as far as that is known."""
    for call_id in _IDS:
        calling = _calling(template, call_id)
        whole = _rendered(template, [_QUESTION, calling])
        if not whole:
            continue
        plain = _rendered(template, [_QUESTION, _said(_ANSWER)])
        before, _, after = plain.rpartition(_ANSWER)
        for header in (_rendered(template, [_QUESTION], begin=True), before):
            if header and whole.startswith(header):
                yield whole.removeprefix(header).removesuffix(after)
        yield _after_question(whole)


def _written_turns(template: ChatTemplate) -> Iterator[str]:
    """An answer without calls, and the beginning of one."""
    yield _after_question(_rendered(template, [_QUESTION, _said(_ANSWER)]))
    yield _after_question(_rendered(template, [_QUESTION], begin=True))


def _after_question(text: str) -> str:
    return text.rpartition(_QUESTION["content"])[2]


def _written_thoughts(template: ChatTemplate) -> Iterator[str]:
    thinking = _said(_ANSWER) | {"reasoning_content": _THOUGHT}
    calling = _calling(template, _IDS[0]) | {"reasoning_content": _THOUGHT}
    result = {"role": "tool", "tool_call_id": _IDS[0], "content": "RESULT"}
    typed = {"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}
    conversations = ([thinking], [calling], [calling, result], [{"role": "assistant", "content": [*typed]}])
    for variables in (_THINKING, {}):
        for messages in conversations:
            yield _rendered(template, [_QUESTION, *messages], variables)


def _begun(template: ChatTemplate) -> Iterator[str]:
    """The prompt for an answer, if the model shall think and as it is by itself."""
    for variables in (_THINKING, {}):
        yield _rendered(template, [_QUESTION], variables, begin=True).rstrip()


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calling(template: ChatTemplate, call_id: str) -> Message:
    traits = template.traits
    arguments = json.dumps(_ARGUMENTS) if traits.text_arguments else _ARGUMENTS
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": None if traits.null_content else "", "tool_calls": [call]}


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    begin: bool = False,
) -> str:
    """The prompt; none where the template refuses."""
    shown = with_parts(messages) if template.traits.typed_content else messages
    try:
        names = {**(variables or {}), "add_generation_prompt": begin}
        return template.render_as_given(shown, names, tools=_DECLARED).text
    except Exception:  # whatever it is, it means that this template does not write that
        return ""
