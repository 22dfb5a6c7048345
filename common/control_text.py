"""Control tokens that a message spells, kept apart from those that the chat template writes.

A prompt is tokenised as one text, so a message that holds `<|im_end|>` would end its own turn. Before the template is
rendered, each such string is therefore replaced by a single private-use character, which no template can mistake for
anything; afterwards the string is put back, and its place is noted, for the tokenizer to read as ordinary text there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from common.errors import InvalidRequest
from common.generation import TextSpan

_Rewrite: TypeAlias = Callable[[str], str]

_BEGINNING = 2  # characters
# Planes 15 and 16. They take part in no script, and blanks are not stripped from between them.
_STAND_INS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_STAND_IN = re.compile("[\U000f0000-\U0010ffff]")
# The same as JSON in ASCII has them.
_ESCAPED = re.compile(r"\\u([dD][bB][89a-fA-F][0-9a-fA-F])\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class ControlStrings:
    """Finds strings in a text as a tokenizer does: from the left, the longest first."""

    def __init__(self, strings: Collection[str]) -> None:
        self._strings = frozenset(filter(None, strings))
        # By first characters, since some models have thousands: lengths of those that begin so, longest first.
        self._lengths: dict[str, list[int]] = {}
        for length in sorted({len(string) for string in self._strings}, reverse=True):
            for beginning in {string[:_BEGINNING] for string in self._strings if len(string) == length}:
                self._lengths.setdefault(beginning, []).append(length)
        self._beginning = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    def spans(self, text: str) -> Iterator[TextSpan]:
        end = 0
        while match := self._beginning.search(text, end):
            start = match.start()
            end = start + 1
            for length in self._lengths[match.group()]:
                if text[start : start + length] in self._strings:
                    end = min(start + length, len(text))  # a slice may have ended sooner
                    yield start, end
                    break


class StandIns:
    """The private-use characters of one rendering.

    Args:
        texts: whatever else the rendering is made from, in any nesting. None of the characters occurs in it.
    """

    def __init__(self, *texts: Any) -> None:
        self._texts = texts
        self._free: Iterator[str] | None = None  # made when the first one is needed, which is seldom
        self._stand_ins: dict[str, str] = {}  # by the string that each stands for

    def hide(self, value: Any, strings: ControlStrings) -> Any:
        """A copy of a JSON value with stand-ins for all the strings that it holds.

        Raises:
            InvalidRequest: the texts leave no character free.
        """
        return _rewritten(value, lambda text: self._hide(text, strings))

    def reveal(self, text: str) -> tuple[str, list[TextSpan]]:
        """A rendered text with the strings put back, and their places."""
        if not self._stand_ins:
            return text, []
        originals = {stand_in: string for string, stand_in in self._stand_ins.items()}
        for string, stand_in in self._stand_ins.items():
            originals[_escape(stand_in)] = _escape(string)
        pieces: list[str] = []
        literals: list[TextSpan] = []
        position = end = 0
        for match in re.finditer("|".join(map(re.escape, originals)), text):
            before, original = text[end : match.start()], originals[match.group()]
            end = match.end()
            position += len(before)
            literals.append((position, position + len(original)))
            position += len(original)
            pieces += [before, original]
        return "".join([*pieces, text[end:]]), literals

    def _hide(self, text: str, strings: ControlStrings) -> str:
        pieces: list[str] = []
        end = 0
        for start, stop in strings.spans(text):
            pieces += [text[end:start], self._stand_in(text[start:stop])]
            end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def _stand_in(self, string: str) -> str:
        if string not in self._stand_ins:
            if self._free is None:
                self._free = _free_characters(self._texts)
            character = next(self._free, None)
            if character is None:
                raise InvalidRequest("The request uses every private-use character of Unicode; leave one out.")
            self._stand_ins[string] = character
        return self._stand_ins[string]


def _free_characters(texts: Any) -> Iterator[str]:
    taken: set[str] = set()

    def note(text: str) -> str:
        taken.update(_STAND_IN.findall(text))
        taken.update(json.loads(f'"\\u{high}\\u{low}"') for high, low in _ESCAPED.findall(text))
        return text

    _rewritten(texts, note)
    return (chr(code) for codes in _STAND_INS for code in codes if chr(code) not in taken)


def _escape(text: str) -> str:
    return json.dumps(text)[1:-1]


def _rewritten(value: Any, rewrite: _Rewrite) -> Any:
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, dict):
        return {_rewritten(key, rewrite): _rewritten(item, rewrite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rewritten(item, rewrite) for item in value]
    return value
