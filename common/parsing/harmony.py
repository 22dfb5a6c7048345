"""Harmony, the dialect of gpt-oss: thoughts, calls and text for the user are messages in channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}

The prompt ends in `<|start|>assistant`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from common.parsing import frames
from common.parsing.dialect import CallRules, Dialect, ReadOptions
from common.parsing.json_text import read_object
from common.parsing.messages import MESSAGE, RECIPIENT, START, Message, MessageReader, ends_in_thought
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, NoCall, Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_CHANNEL: Final = "<|channel|>"
_CHANNELS: Final = ("analysis", "commentary", "final")
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_NAMESPACE: Final = "functions."
_TO: Final = rf"(?:{RECIPIENT}(?P<{{}}>[^\s<]++)\s*+)?+"
_HEADER: Final = re.compile(
    rf"(?:{re.escape(START)}[\w.-]*+)?+\s*+{_TO.format('before')}"
    rf"(?:{re.escape(_CHANNEL)}\s*+(?P<channel>[\w-]++)\s*+{_TO.format('after')}"
    rf"(?:<\|constrain\|>\s*+)?+[\w./-]*+\s*+)?+"
    rf"{re.escape(MESSAGE)}",
    re.ASCII,
)


class HarmonyDialect(Dialect):
    """A call needs a declared tool as its recipient, in whatever channel. The user gets what is no thought and no call,
    with its header where it is addressed to anybody else."""

    name = "harmony"
    end_of_thought = "<|end|><|start|>assistant<|channel|>final<|message|>"

    def read(self, scanner: Scanner, options: ReadOptions) -> Reading[None]:
        return _HarmonyReader(scanner, options).read()

    def begins_in_thought(self, prompt: str, given: int = 0) -> bool:
        return ends_in_thought(prompt, _HarmonyReader)

    def frame(self, grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
        return frames.harmony(grammar, calls, answer=answer, in_thought=in_thought)


class _HarmonyReader(MessageReader):
    header = (START, _CHANNEL)
    ends = _ENDS

    @staticmethod
    def message(header: str, *, amid_text: bool) -> Message | None:
        found = _HEADER.fullmatch(header)
        if found is None or (amid_text and not header.startswith(START) and found["channel"] not in _CHANNELS):
            return None
        recipient = found["before"] or found["after"]
        if recipient is not None and recipient != "user":
            return Message("calls", recipient, header)
        return Message("thought" if found["channel"] == "analysis" else "content", header=header)

    def calls(self, recipient: str) -> Reading[None]:
        tool = self.tools.get(recipient.removeprefix(_NAMESPACE)) or self.tools.get(recipient)
        if tool is None:
            raise NoCall
        yield CallBegin(tool.name)
        yield from self.scanner.blanks()
        if (yield from self.scanner.ahead(*_ENDS)):
            yield CallArguments("{}")
        else:
            yield from read_object(self.scanner, tool, stops=_ENDS)
        yield CallEnd()
        yield from self.scanner.blanks()
