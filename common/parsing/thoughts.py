"""The thoughts of an answer while it is generated: how many tokens they have, and when they have had enough."""

from __future__ import annotations

import codecs

from common.generation import Thoughts
from common.parsing.answer import AnswerParser
from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.glimmer import GlimmerDialect
from common.parsing.harmony import HarmonyDialect
from common.parsing.tags import TagDialect


def dialect_of(thoughts: Thoughts) -> Dialect:
    """The dialect as far as thoughts go: without any format of calls."""
    match thoughts.dialect:
        case "tags":
            return TagDialect((thoughts.start, thoughts.end), ())
        case "harmony":
            return HarmonyDialect()
        case "glimmer":
            return GlimmerDialect()


def ending(thoughts: Thoughts) -> str:
    """What ends a thought whose budget is spent: the message, then what the model itself would write."""
    end = dialect_of(thoughts).end_of_thought
    assert end is not None, "a dialect without thoughts"
    return thoughts.message + (end.lstrip() if thoughts.message[-1:].isspace() else end)


class ThoughtTracker:
    """Follows an answer token by token.

    A token counts if the text of the answer ends inside a thought after it. So the one that opens a thought counts, and
    the one that closes it does not; where a tag takes several tokens, that is the last of them.

    Attributes:
        tokens: counted so far.
    """

    def __init__(self, thoughts: Thoughts, *, tokens: int = 0) -> None:
        self.tokens = tokens
        self._budget = thoughts.budget
        self._parser = AnswerParser(dialect_of(thoughts), ReadOptions(in_thought=thoughts.inside))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._parser.thinking

    @property
    def spent(self) -> bool:
        """Whether the thought in which the text ends has to be ended now: not inside a character."""
        pending, _ = self._decoder.getstate()
        return self.thinking and self._budget is not None and self.tokens >= self._budget and not pending

    def feed(self, raw: bytes, *, counts: bool = True) -> None:
        """Go on by what a token adds to the text, which may end inside a character.

        Args:
            counts: false for what is no token of its own.
        """
        self._parser.feed(self._decoder.decode(raw))
        if counts and self.thinking:
            self.tokens += 1
