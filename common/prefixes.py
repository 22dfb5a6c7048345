"""Prompts that begin as the one before did, and what to say where they do not.

The engine keeps what it has processed and looks it up by the beginning of a prompt. In a conversation, the prompt of a
turn and the answer to it should therefore be the beginning of the next turn's prompt. Where they are not, everything
from the first difference on is processed again, so the log says where that is and why.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from common.conversations import Message

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


class _Returned(NamedTuple):
    """An answer that a client has sent back."""

    position: int  # among the messages
    key: bytes  # under which the history keeps its turn
    content: bytes  # digest


@dataclass(frozen=True)
class Turn:
    """A prompt and what it was made from.

    Attributes:
        prompt: text.
        roles: of the messages.
        messages: a digest of each.
        inputs: a digest of whatever else the template was given, by name: tools and variables.
        returned: the assistant's messages, the last one first.
    """

    prompt: str
    roles: list[str]
    messages: list[bytes]
    inputs: dict[str, bytes]
    returned: list[_Returned]

    @staticmethod
    def of(prompt: str, messages: Sequence[Message], inputs: Mapping[str, Any]) -> Turn:
        """
        Args:
            messages: with texts, not parts, as their contents.
        """
        digests = [_digest(message) for message in messages]
        returned = [
            _Returned(index, _key(digests[:index], message["content"]), _digest(message["content"]))
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return Turn(
            prompt,
            [message["role"] for message in messages],
            digests,
            {name: _digest(value) for name, value in inputs.items() if value is not None},
            returned[::-1],
        )


@dataclass(frozen=True)
class _Answered:
    turn: Turn
    answer: str  # as the model gave it
    content: bytes  # digest of what the client got of it

    @property
    def text(self) -> str:
        return self.turn.prompt + self.answer


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
        reasoning_tags: texts that begin and end a thought.
        max_turns: that are kept, the oldest go first.
        max_characters: of all prompts and answers together.
    """

    def __init__(
        self,
        reasoning_tags: tuple[str, str] = ("<think>", "</think>"),
        *,
        max_turns: int = MAX_TURNS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._reasoning_tags = reasoning_tags
        self._max_turns = max_turns
        self._max_characters = max_characters
        # By the last message and the answer: clients send both back, whatever they change before them.
        self._turns: OrderedDict[bytes, _Answered] = OrderedDict()
        self._characters = 0

    def remember(self, turn: Turn, answer: str, content: str | None = None) -> None:
        """Keep a turn for the one that follows it.

        Args:
            answer: the text that the model gave, all of it.
            content: what the client gets as the message's content, where that is something else.
        """
        content = answer if content is None else content
        key = _key(turn.messages, content)
        self._forget(key)
        self._turns[key] = _Answered(turn, answer, _digest(content))
        self._characters += len(self._turns[key].text)
        while len(self._turns) > self._max_turns or self._characters > self._max_characters:
            self._forget(next(iter(self._turns)))

    def check(self, turn: Turn) -> PrefixBreak | None:
        """How a prompt fails to go on from the turn before it; None if it does, or if no such turn is known."""
        for returned in turn.returned:
            if (earlier := self._turns.get(returned.key)) is not None:
                return self._compare(earlier, turn, returned)
        return None

    def _forget(self, key: bytes) -> None:
        if (answered := self._turns.pop(key, None)) is not None:
            self._characters -= len(answered.text)

    def _compare(self, earlier: _Answered, turn: Turn, returned: _Returned) -> PrefixBreak | None:
        expected = earlier.text
        if turn.prompt.startswith(expected):
            return None
        at = _common_length(expected, turn.prompt)
        return PrefixBreak(
            len(expected[:at].encode()),
            len(expected) - at,
            self._reason(earlier, turn, returned, at),
            expected[at : at + _EXCERPT],
            turn.prompt[at : at + _EXCERPT],
        )

    def _reason(self, earlier: _Answered, turn: Turn, returned: _Returned, at: int) -> str:
        expected = earlier.text
        changes = [
            *_changed_messages(earlier.turn, turn, returned.position),
            *_changed_inputs(earlier.turn.inputs, turn.inputs),
        ]
        if _shows_time(expected, at) and _shows_time(turn.prompt, at):
            return " and ".join(["a date or time in the prompt is another", *changes])
        if changes:
            return " and ".join(changes)
        if returned.content != earlier.content:
            return "the client has changed the blanks around the answer"
        around = expected[max(0, at - _EXCERPT) : at + _EXCERPT] + turn.prompt[at : at + _EXCERPT] + earlier.answer
        if any(tag in around for tag in self._reasoning_tags):
            return "the chat template leaves earlier thoughts out, or writes them in another way"
        if at < len(earlier.turn.prompt):
            return "the chat template writes earlier messages in another way once others follow"
        if turn.prompt.startswith(earlier.answer.strip(), len(earlier.turn.prompt)):
            return "the chat template trims the answer"
        return "the chat template writes the answer in another way than the model did"


def _changed_messages(earlier: Turn, turn: Turn, index: int) -> list[str]:
    """What a client has changed in the messages before the answer at `index`, as a clause or none."""
    before, after = earlier.messages, turn.messages[:index]
    if before == after:
        return []
    first = _common_length(before, after)
    if first < len(after) and after[first + 1 :] == before[first + 1 :]:
        is_system = turn.roles[first] == "system" == earlier.roles[first]
        return ["the system prompt was edited" if is_system else f"message {first} was edited"]
    removed = len(before) - len(after)
    if removed > 0 and before[first + removed :] == after[first:]:
        return [f"{_count(removed)} removed at position {first}"]
    if removed < 0 and before[first:] == after[first - removed :]:
        return [f"{_count(-removed)} inserted at position {first}"]
    return [f"several messages from number {first} on were edited"]


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _count(messages: int) -> str:
    return "a message was" if messages == 1 else f"{messages} messages were"


def _changed_inputs(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{name} changed" for name in changed]


def _shows_time(text: str, at: int) -> bool:
    """Whether a date or a time of day reaches over this place."""
    start = max(0, at - _EXCERPT)
    return any(match.start() <= at - start <= match.end() for match in _TIME.finditer(text[start : at + _EXCERPT]))


def _key(messages: Sequence[bytes], answer: str) -> bytes:
    return _digest([*(digest.hex() for digest in messages[-1:]), answer.strip()])


def _digest(value: object) -> bytes:
    # Half surrogate pairs cannot be encoded as they are.
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
