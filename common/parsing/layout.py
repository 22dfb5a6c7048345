"""The text of an answer without the blanks that are layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from common.parsing.pieces import Content, Thought
from common.parsing.scanner import Scanner

LAYOUT: Final = " \t\r\n"  # whitespace that may be layout
_BLANK_LINES: Final = re.compile(rf"[{LAYOUT}]*\n")
_ALL_BLANKS: Final = re.compile(rf"[{LAYOUT}]+")


class ContentText:
    """The text for the user, without the blanks that are layout.

    Args:
        calls: there may be calls, before which blanks are layout.

    Attributes:
        fresh: nothing but blanks has come since the beginning of the answer, or the last thought or call.
    """

    def __init__(self, scanner: Scanner, *, calls: bool) -> None:
        self.fresh = True
        self._scanner = scanner
        self._calls = calls
        self._silent = True  # nothing but blanks so far
        self._divided = False  # there has been a thought or a call
        self._blanks: list[str] = []  # read last, not yet given out
        self._layout: re.Pattern[str] | None = None  # what is dropped at the beginning of the next text
        self._gap: Content | None = None  # blanks before a call, if they stand between two texts

    def text(self, text: str) -> list[Content]:
        """Text which has just been read."""
        words = text
        if self._calls or self.fresh:
            words = text.rstrip(LAYOUT)
            if not words:
                self._blanks.append(text)
                return []
            if not self._calls:
                words = text
        blanks = text[len(words) :]
        end = self._scanner.position - len(blanks)
        if self._blanks:
            words = "".join([*self._blanks, words])
        self._blanks = [blanks] if blanks else []
        if not self.fresh:
            return [Content(words, end - len(words))]
        if self._layout is not None and (found := self._layout.match(words)):
            words = words[found.end() :]
        content = [Content(words, end - len(words))]
        if self._gap is not None:
            content.insert(0, self._gap)
        self.fresh = self._silent = False
        self._layout = self._gap = None
        return content

    def call(self, start: int) -> None:
        """A call stands here, in a block that starts at some position. It takes the blanks around it.

        Between two texts those before it stay, or else those after it, so that the texts do not run together.
        """
        if self._gap is None and self._blanks and not self._silent:
            blanks = "".join(self._blanks)
            self._gap = Content(blanks, start - len(blanks))
        self._begin_anew(None if self._gap is None and not self._silent else _ALL_BLANKS)

    def thought(self) -> Iterator[Content]:
        """A thought begins here, or one ends of which nothing is known."""
        if not self.fresh and self._blanks:
            blanks = "".join(self._blanks)
            yield Content(blanks, self._scanner.position - len(blanks))
        self._begin_anew(_BLANK_LINES)

    def end(self) -> Iterator[Content]:
        """The answer ends here."""
        if self._blanks and not (self.fresh and self._divided):
            blanks = "".join(self._blanks)
            yield Content(blanks, self._scanner.position - len(blanks))

    def _begin_anew(self, layout: re.Pattern[str] | None) -> None:
        self.fresh = self._divided = True
        self._blanks = []
        self._layout = layout


class ThoughtText:
    """Strips newlines from the beginning and from the end of all thoughts of an answer.

    Between two thoughts they stay, so that these do not run together.
    """

    def __init__(self) -> None:
        self._begun = False
        self._after_call = False
        self._blanks: list[str] = []  # read, not yet given out: the thought may end with them

    def text(self, text: str) -> Iterator[Thought]:
        if self._after_call and (self._blanks or not self._begun):
            text = text.lstrip(LAYOUT)
        end = len(text.rstrip(LAYOUT))
        if end:
            words = "".join([*self._blanks, text[:end]])
            yield Thought(words if self._begun else words.lstrip("\r\n"))
            self._begun = True
            self._after_call = False
            self._blanks = []
        if end < len(text):
            self._blanks.append(text[end:])

    def call(self) -> None:
        """A call stands here. Of the blanks around it only those stay that separate two texts."""
        self._after_call = True

    def end(self) -> Iterator[Thought]:
        """A thought ends here."""
        blanks = "".join(self._blanks)
        spaces = "" if self._after_call else blanks[: len(blanks) - len(blanks.lstrip(" \t"))]
        if spaces and self._begun:
            yield Thought(spaces)
        self._blanks = [blanks[len(spaces) :]] if self._begun else []
        self._after_call = False
