"""Prompts that begin as the one before did, and what to say where they do not.

The engine keeps what it has processed and looks it up by the beginning of a prompt. In a conversation, the prompt of a
turn and the answer to it should therefore be the beginning of the next turn's prompt. `common.splicing` sees to that as
far as the template allows it. Where it is not so, everything from the first difference on is processed again, and the
log says where that is and why.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

from common.conversations import Message, Place
from common.generation import TextSpan
from common.templating import RenderedPrompt

MAX_TURNS = 64
MAX_CHARACTERS = 16_000_000  # of all turns together
_EXCERPT = 24  # characters
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d\d|"
    r"(\d{1,2} )?\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,4}|"
    r"\b(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)(day)?\b"
)

# --- volatile lines -----------------------------------------------------------------------------------------------


class VolatileLine(NamedTuple):
    """A line that an agent puts before its system prompt, other in every request and of no use to the model."""

    agent: str
    pattern: re.Pattern[str]  # of the line without its end


VOLATILE_LINES = (VolatileLine("Claude Code", re.compile(r"x-anthropic-billing-header:.*", re.IGNORECASE)),)


def without_volatile_line(text: str) -> str:
    """A system prompt without a first line that would make every prompt differ from its beginning."""
    first, _, rest = text.lstrip().partition("\n")
    if any(line.pattern.fullmatch(first.strip()) for line in VOLATILE_LINES):
        return rest.lstrip("\r\n")
    return text


# --- turns --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """What is kept of the messages that a prompt was made from.

    Attributes:
        roles: of each.
        digests: of each without its thought, which clients may leave out of a later request.
        thoughts: of each.
    """

    roles: list[str]
    digests: list[bytes]
    thoughts: list[str | None]

    @staticmethod
    def of(messages: Sequence[Message]) -> Outline:
        """
        Args:
            messages: with texts, not parts, as their contents.
        """
        return Outline(
            [message["role"] for message in messages],
            [_digest(_without_thought(message)) for message in messages],
            [message.get("reasoning_content") for message in messages],
        )


class Seam(NamedTuple):
    """A place in a prompt at which text of the template begins, and before which text of a model stands.

    Attributes:
        plain: characters before it, if the template had written all of them.
        sent: characters before it.
    """

    plain: int
    sent: int


class WrittenPrompt(NamedTuple):
    """A prompt, and what stands for what in it.

    Attributes:
        prompt: as it is sent.
        plain: text that the template alone would have written.
        seams: in their order.
        starts: where texts begin in the plain text, by their place, as far as somebody wanted to know.
    """

    prompt: RenderedPrompt
    plain: str
    seams: Sequence[Seam] = ()
    starts: Mapping[Place, int] = MappingProxyType({})

    @staticmethod
    def by_template(prompt: RenderedPrompt) -> WrittenPrompt:
        return WrittenPrompt(prompt, prompt.text)


@dataclass(frozen=True)
class Turn:
    """A prompt and what it was made from.

    Attributes:
        inputs: a digest of whatever else the template was given, by name: tools and variables.
    """

    written: WrittenPrompt
    messages: Outline
    inputs: dict[str, bytes]

    @property
    def prompt(self) -> str:
        return self.written.prompt.text

    @staticmethod
    def of(written: WrittenPrompt, messages: Sequence[Message], inputs: Mapping[str, Any]) -> Turn:
        digests = {name: _digest(value) for name, value in inputs.items() if value is not None}
        return Turn(written, Outline.of(messages), digests)


class Answer(NamedTuple):
    """What a model made of a prompt.

    Attributes:
        text: all that it gave.
        literals: where the text spells a control token that the model did not give.
        message: what the client got of it, in the form of the messages of a `Turn`.
    """

    text: str
    literals: list[TextSpan]
    message: Message


@dataclass(frozen=True)
class Answered:
    """A turn and the answer to it.

    Attributes:
        base: a digest of what the template made of the messages alone; None where it could not.
    """

    turn: Turn
    answer: Answer
    base: bytes | None

    @property
    def text(self) -> str:
        return self.turn.prompt + self.answer.text

    @property
    def thought(self) -> str | None:
        return self.answer.message.get("reasoning_content")


class Returned(NamedTuple):
    """An answer that a client has sent back.

    Attributes:
        position: among the messages of the request.
        message: as it came back.
    """

    position: int
    message: Message
    earlier: Answered

    @property
    def is_unchanged(self) -> bool:
        """Whether it says what the model said, whatever the layout."""
        return self.has_its_thought and self.has_its_content and self.has_its_calls

    @property
    def has_its_thought(self) -> bool:
        """Leaving it out is no change."""
        thought = self.message.get("reasoning_content")
        return thought is None or thought.strip() == (self.earlier.thought or "").strip()

    @property
    def has_its_content(self) -> bool:
        return _content(self.message).strip() == _content(self.earlier.answer.message).strip()

    @property
    def has_its_calls(self) -> bool:
        return _calls(self.message) == _calls(self.earlier.answer.message)


class PrefixBreak(NamedTuple):
    """Where a prompt differs from the prompt and the answer of the turn before it."""

    byte: int  # of both texts, in UTF-8
    lost: int  # characters of the earlier prompt and answer from there on
    reason: str  # a clause
    before: str  # a few characters from there on, of the earlier prompt and answer
    after: str  # and of the prompt

    def describe(self, *, quote: bool) -> str:
        """A line for the log, with the characters where `quote` is true."""
        line = (
            f"The prompt differs from the prompt and the answer of the turn before it at byte {self.byte}, "
            f"{self.lost} characters before their end, and is processed again from there: {self.reason}"
        )
        return f"{line} ({self.before!r} became {self.after!r})" if quote else line


class PrefixHistory:
    """The latest turns of one model's conversations.

    Args:
        max_turns: that are kept, the oldest go first.
        max_characters: of all prompts and answers together.
    """

    def __init__(self, *, max_turns: int = MAX_TURNS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_turns = max_turns
        self._max_characters = max_characters
        # By the last message and the answer: clients send both back, whatever they change before them.
        self._turns: OrderedDict[bytes, Answered] = OrderedDict()
        self._by_call: dict[str, bytes] = {}  # keys of the turns whose answers have calls, by the id of the first one
        self._characters = 0

    def remember(self, turn: Turn, answer: Answer, base: bytes | None = None) -> None:
        """Keep a turn for the one that follows it. `base` is that of `Answered`."""
        key = _key(turn.messages.digests, answer.message)
        self._forget(key)
        self._turns[key] = Answered(turn, answer, base)
        self._characters += len(self._turns[key].text)
        if (call := _first_call(answer.message)) is not None:
            self._by_call[call] = key
        while len(self._turns) > self._max_turns or self._characters > self._max_characters:
            self._forget(next(iter(self._turns)))

    def latest(self, messages: Sequence[Message], outline: Outline) -> Returned | None:
        """The last answer among some messages that is known."""
        for position in range(len(messages) - 1, -1, -1):
            message = messages[position]
            if message["role"] == "assistant":
                key = self._by_call.get(_first_call(message) or "") or _key(outline.digests[:position], message)
                if (earlier := self._turns.get(key)) is not None:
                    return Returned(position, message, earlier)
        return None

    def check(self, turn: Turn, returned: Returned) -> PrefixBreak | None:
        """How a prompt fails to go on from the turn before it; None if it does."""
        expected, prompt = returned.earlier.text, turn.prompt
        if prompt.startswith(expected):
            return None
        at = common_length(expected, prompt)
        return PrefixBreak(
            len(expected[:at].encode()),
            len(expected) - at,
            self._reason(turn, returned, at),
            expected[at : at + _EXCERPT],
            prompt[at : at + _EXCERPT],
        )

    def _forget(self, key: bytes) -> None:
        if (answered := self._turns.pop(key, None)) is not None:
            self._characters -= len(answered.text)
            call = _first_call(answered.answer.message)
            if call is not None and self._by_call.get(call) == key:
                del self._by_call[call]

    def _reason(self, turn: Turn, returned: Returned, at: int) -> str:
        earlier, prompt = returned.earlier, turn.prompt
        expected, answer = earlier.text, earlier.answer.text
        before = len(earlier.turn.prompt)
        changes = [
            *_changed_messages(earlier.turn.messages, turn.messages, returned.position),
            *_changed_inputs(earlier.turn.inputs, turn.inputs),
            *_changed_answer(returned),
        ]
        if _shows_time(expected, at) and _shows_time(prompt, at):
            return " and ".join(["a date or time in the prompt is another", *changes])
        if changes:
            return " and ".join(changes)
        thoughts = filter(None, [*earlier.turn.messages.thoughts, earlier.thought])
        if any(thought.strip() not in prompt for thought in thoughts):
            return "the chat template leaves earlier thoughts out, or writes them in another way"
        if at < before:
            return "the chat template writes earlier messages in another way once others follow"
        if _content(returned.message) != _content(earlier.answer.message):
            return "the client has changed the blanks around the answer"
        if prompt.startswith(answer.strip(), before):
            return "the chat template trims the answer"
        return "the chat template writes the answer in another way than the model did"


def common_length(first: str | Sequence[bytes], second: str | Sequence[bytes]) -> int:
    """Of the beginning that two sequences share."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def digest_of(prompt: RenderedPrompt) -> bytes:
    return _digest([prompt.text, prompt.literals])


# --- what changed -------------------------------------------------------------------------------------------------


def _changed_messages(before: Outline, after: Outline, index: int) -> list[str]:
    """What a client has changed in the messages before the answer at `index`, as a clause or none."""
    earlier, later = before.digests, after.digests[:index]
    if earlier == later:
        return []
    first = common_length(earlier, later)
    if first < len(later) and later[first + 1 :] == earlier[first + 1 :]:
        is_system = after.roles[first] == "system" == before.roles[first]
        return ["the system prompt was edited" if is_system else f"message {first} was edited"]
    removed = len(earlier) - len(later)
    if removed > 0 and earlier[first + removed :] == later[first:]:
        return [f"{_count(removed)} removed at position {first}"]
    if removed < 0 and earlier[first:] == later[first - removed :]:
        return [f"{_count(-removed)} inserted at position {first}"]
    return [f"several messages from number {first} on were edited"]


def _changed_answer(returned: Returned) -> list[str]:
    changed = []
    if not returned.has_its_thought:
        changed.append("the client has changed the thought before the answer")
    if not returned.has_its_content:
        changed.append("the client has changed the answer")
    if not returned.has_its_calls:
        changed.append("the client has changed the calls of the answer")
    return changed


def _count(messages: int) -> str:
    return "a message was" if messages == 1 else f"{messages} messages were"


def _changed_inputs(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{name} changed" for name in changed]


def _shows_time(text: str, at: int) -> bool:
    """Whether a date or a time of day reaches over this place."""
    start = max(0, at - _EXCERPT)
    return any(match.start() <= at - start <= match.end() for match in _TIME.finditer(text[start : at + _EXCERPT]))


# --- messages -----------------------------------------------------------------------------------------------------


def _without_thought(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls(message)
    return kept


def _content(message: Message) -> str:
    return message.get("content") or ""


def _calls(message: Message) -> list[tuple[str, Any]]:
    """Names and arguments of the calls, the arguments as values: how they were written does not matter."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], _value(function["arguments"])) for function in functions]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _first_call(message: Message) -> str | None:
    calls = message.get("tool_calls")
    return calls[0]["id"] if calls else None


def _key(before: Sequence[bytes], message: Message) -> bytes:
    return _digest([*(digest.hex() for digest in before[-1:]), _content(message).strip(), _calls(message)])


def _digest(value: object) -> bytes:
    # Half surrogate pairs cannot be encoded as they are.
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
