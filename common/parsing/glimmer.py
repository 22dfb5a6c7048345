"""The dialect of Muse Glimmer: thoughts, calls and text for the user are messages to different recipients.

    ` to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>`
    <|start|>assistant to=NAME<|message|><atem:function_calls>
    <atem:invoke name="NAME">
    <atem:parameter name="KEY">VALUE</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

The prompt ends in `<|start|>assistant`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from common.parsing import frames
from common.parsing.dialect import CallRules, Dialect, ReadOptions
from common.parsing.formats.base import NAME_LENGTH
from common.parsing.formats.tagged_values import Ending, read_value
from common.parsing.messages import MESSAGE, RECIPIENT, START, Message, MessageReader, ends_in_thought
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Reading, Waiting
from common.parsing.scanner import Scanner
from common.parsing.values import ArgumentsWriter

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_ENDS: Final = ("<|eom|>", "<|eot|>")
_HEADER: Final = re.compile(
    rf"(?:{re.escape(START)}[\w.-]*+)?+\s*+(?:{RECIPIENT}(?P<recipient>[^\s<]++)\s*+)?+{re.escape(MESSAGE)}",
    re.ASCII,
)
_CALLS: Final = "<atem:function_calls>"
_CALLS_END: Final = "</atem:function_calls>"
_INVOKE: Final = '<atem:invoke name="'
_INVOKE_END: Final = "</atem:invoke>"
_PARAMETER: Final = '<atem:parameter name="'
_PARAMETER_END: Final = "</atem:parameter>"
_ENDINGS: Final = (
    Ending((_PARAMETER_END,), (_PARAMETER, _INVOKE_END, _INVOKE, _CALLS_END, *_ENDS)),
    Ending((_INVOKE_END,), (_INVOKE, _CALLS_END, *_ENDS)),
)


class GlimmerDialect(Dialect):
    """In a message to anybody but the model itself and the user, the names within count, not the recipient. The user
    gets what is no thought and no call, with its header where it is addressed to anybody else."""

    name = "glimmer"
    end_of_thought = "<|eom|><|start|>assistant to=user<|message|>"

    def read(self, scanner: Scanner, options: ReadOptions) -> Reading[None]:
        return _GlimmerReader(scanner, options).read()

    def begins_in_thought(self, prompt: str, given: int = 0) -> bool:
        return ends_in_thought(prompt, _GlimmerReader)

    def frame(self, grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
        return frames.glimmer(grammar, calls, answer=answer, in_thought=in_thought)


class _GlimmerReader(MessageReader):
    header = (START,)
    ends = _ENDS

    @staticmethod
    def message(header: str, *, amid_text: bool) -> Message | None:
        found = _HEADER.fullmatch(header)
        if found is None:
            return None
        match found["recipient"]:
            case "self":
                return Message("thought", header=header)
            case None | "user":
                return Message("content", header=header)
            case recipient:
                return Message("calls", recipient, header)

    def calls(self, recipient: str) -> Reading[None]:
        scanner = self.scanner
        yield from scanner.blanks()
        yield from scanner.accept(_CALLS)
        yield from scanner.blanks()
        yield from scanner.expect(_INVOKE)
        while True:
            yield from self._read_invoke()
            yield from scanner.blanks()
            if (yield from scanner.accept(_INVOKE, _CALLS_END)) != _INVOKE:
                break
        yield from scanner.blanks()

    def _read_invoke(self) -> Reading[None]:
        scanner = self.scanner
        name = yield from _attribute(scanner)
        if name not in self.tools:
            raise NoCall
        yield CallBegin(name)
        writer = ArgumentsWriter(self.tools[name])
        yield from scanner.blanks()
        tag = yield from scanner.accept(_PARAMETER, _INVOKE_END)
        while tag == _PARAMETER:
            yield writer.key((yield from _attribute(scanner)))
            tag = yield from read_value(scanner, writer, _ENDINGS, written="exact")
            if tag == _PARAMETER_END:
                tag = yield from scanner.accept(_PARAMETER, _INVOKE_END)
        if tag is None and not (yield from scanner.ahead(_INVOKE, _CALLS_END, *_ENDS)):
            if not (yield from scanner.at_end()):
                raise NoCall
            scanner.missing()
        yield writer.end()
        yield CallEnd()


def _attribute(scanner: Scanner) -> Waiting[str]:
    """Read the rest of a tag from the value of its attribute on; that is returned."""
    value, quote = yield from scanner.until('"', limit=NAME_LENGTH)
    _, end = yield from scanner.until(">", limit=NAME_LENGTH)
    if not quote or not end:
        raise NoCall
    return value
