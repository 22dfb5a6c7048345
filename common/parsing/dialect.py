"""The contract of a dialect: how a model writes a whole answer, thoughts, calls and all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from loguru import logger

from common.generation import DialectName
from common.parsing.formats.base import Tool, Tools
from common.parsing.pieces import NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.parsing.grammar import GrammarWriter


class ReadOptions(NamedTuple):
    """
    Attributes:
        tools: that may be called; without any, what looks like a call is content.
        in_thought: the prompt ends inside a thought.
        calls_in_thoughts: a call inside a thought is one, if no content follows the thought.
    """

    tools: Tools = Tools()  # it cannot be changed
    in_thought: bool = False
    calls_in_thoughts: bool = True


class CallRules(NamedTuple):
    """What a grammar shall enforce of calls.

    Attributes:
        tools: one of which is called.
        required: there is at least one call, and no text beside the calls but a thought.
        many: there may be more than one.
    """

    tools: Sequence[Tool]
    required: bool
    many: bool

    @property
    def enforced(self) -> bool:
        """Whether a grammar is needed for them. Otherwise the model is free to call what it wants, as it wants."""
        return self.required or not self.many or any(tool.strict for tool in self.tools)


class Dialect(ABC):
    """How a model writes a whole answer.

    Attributes:
        end_of_thought: what the model would write to end a thought and go on with the answer; None where it has no
            thoughts.
    """

    name: ClassVar[DialectName]
    end_of_thought: str | None

    @abstractmethod
    def read(self, scanner: Scanner, options: ReadOptions) -> Reading[None]:
        """Read an answer from its beginning to its end. Nothing of it is lost but what marks its parts."""

    @abstractmethod
    def begins_in_thought(self, prompt: str, given: int = 0) -> bool:
        """Whether a prompt ends inside a thought.

        Args:
            given: characters at its end that the client wants the answer to begin with.
        """

    @abstractmethod
    def frame(self, grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
        """A Lark expression for a whole answer: a thought, if the model has them, then calls or `@answer`.

        Args:
            calls: None where none may be made.
            answer: there is an `@answer`, which the text for the user has to match; otherwise that is free.
        """


def guarded(reading: Reading[None]) -> Reading[None]:
    """The same. What else it raises than `NoCall` is a defect of ours, which must not cost the text of an answer."""
    try:
        yield from reading
    except NoCall:
        raise
    except Exception as error:
        logger.opt(exception=True).error("What looks like a call of a tool cannot be read; it is given out as text.")
        raise NoCall from error
