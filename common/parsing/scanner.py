"""Text that is read while it arrives.

What a generator reads must not depend on how the text is cut into chunks. So a primitive decides only when it has seen
all that can change its decision, or the end of the text; until then it yields None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Final, Literal

from common.parsing.pieces import NoCall, Streaming, Waiting

_TRIM: Final = 1 << 16  # characters already read, from which on they are dropped once they are the larger part
_BLANKS: Final = re.compile(r"\s*")


class Markers:
    """Strings to look for, the leftmost first, and at one place the longest.

    Attributes:
        strings: none of them empty; the longest first.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(sorted(set(strings), key=lambda string: (-len(string), string)))
        self.longest = max(map(len, self.strings), default=0)
        self._beginnings = frozenset(string[:end] for string in self.strings for end in range(1, len(string)))

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile(_any_of(self.strings) or "(?!)")

    @cached_property
    def _whole_or_begun(self) -> re.Pattern[str]:
        return re.compile(_any_of(self.strings, r"|\Z") or "(?!)")

    def find(self, text: str, start: int, *, more: bool, stop: int | None = None) -> tuple[int, str | None]:
        """The place of the first one, and which it is.

        Without one: the place where the end of the text begins of which some may come when the text goes on.

        Args:
            more: the text may go on.
            stop: look at no more of the text than that.
        """
        size = len(text) if stop is None else min(stop, len(text))
        match = (self._whole_or_begun if more else self._whole).search(text, start, size)
        if match is None:
            return size, None
        found = match.group()
        undecided = more and match.end() == size and found in self._beginnings
        return match.start(), None if undecided else found


def _any_of(strings: Sequence[str], end: str = "") -> str:
    """A regular expression for the longest of some strings that fits. It looks at each character once.

    Args:
        end: an alternative to each character but the first, which then is one to all that follow it.
    """
    rests: dict[str, list[str]] = {}
    for string in filter(None, strings):
        rests.setdefault(string[0], []).append(string[1:])
    branches = []
    for first, rest in rests.items():
        shared = commonprefix(rest)  # noqa: RUF071 # characters are what is meant
        following = _any_of([string[len(shared) :] for string in rest], end)
        if following:
            following = f"(?:{following}{end}){'?' if shared in rest else ''}"
        branches.append(re.escape(first) + "".join(f"(?:{re.escape(one)}{end})" for one in shared) + following)
    return "|".join(branches)


@lru_cache(maxsize=256)
def markers(*strings: str) -> Markers:
    return Markers(strings)


class Scanner:
    """The unread rest of a text, and on demand what was read before it.

    Attributes:
        ending: None while more text may come; "complete" when the model has ended the text itself, "cut" when something
            else has, such as a limit of tokens.
    """

    def __init__(self) -> None:
        self.ending: Literal["complete", "cut"] | None = None
        self._text = ""
        self._next = 0  # index of the first unread character
        self._dropped = 0  # characters before `_text`
        self._before = ""  # the last of them
        self._mark: int | None = None  # index of the first character since the mark
        self._trail: list[str] = []  # what was read since the mark and is dropped
        self._before_mark = ""

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._dropped + self._next

    @property
    def last(self) -> str:
        """The character read last; none at the beginning."""
        return self._text[self._next - 1] if self._next else self._before

    # --- the writing side -----------------------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        if self._next:
            self._drop_read()
        self._text = self._text + text if self._text else text

    def end(self, ending: Literal["complete", "cut"]) -> None:
        self.ending = ending

    # --- going back, which is up to dialects; a format raises `NoCall` -----------------------------------------------

    def mark(self) -> None:
        """Remember what is read from here on. Ends an earlier mark."""
        self._before_mark = self.last
        self._mark = self._next
        self._trail = []

    def since_mark(self) -> str:
        return "".join([*self._trail, self._text[self._mark : self._next]])

    def rewind(self) -> None:
        """Unread what was read since the mark, and drop the mark."""
        assert self._mark is not None
        if self._trail:  # then all since the mark and before `_text` is in it
            trail = "".join(self._trail)
            self._text = trail + self._text
            self._dropped -= len(trail)
            self._before = self._before_mark
        self._next = self._mark
        self.unmark()

    def unmark(self) -> None:
        self._mark = None
        self._trail = []

    # --- primitives -----------------------------------------------------------------------------------------------

    def at_end(self) -> Waiting[bool]:
        """Whether nothing more comes."""
        yield from self._wait_for(1)
        return not self._unread

    def ahead(self, *strings: str) -> Waiting[str | None]:
        """Which of some strings stands here, the longest of them; it is not read."""
        for string in markers(*strings).strings:
            while self.ending is None and self._unread < len(string) and string.startswith(self._peek(len(string))):
                yield None
            if self._text.startswith(string, self._next):
                return string
        return None

    def accept(self, *strings: str) -> Waiting[str | None]:
        """Read one of some strings, the longest that stands here."""
        found = yield from self.ahead(*strings)
        if found is not None:
            self._take(len(found))
        return found

    def expect(self, *strings: str) -> Waiting[str]:
        """Like `accept()`. Raises `NoCall` where none of them stands here."""
        found = yield from self.accept(*strings)
        if found is None:
            raise NoCall
        return found

    def run(self, characters: re.Pattern[str]) -> Waiting[str]:
        """Read as many characters as belong to a class.

        Args:
            characters: a class and a star, such as `[a-z]*`.
        """
        pieces = []
        while True:
            match = characters.match(self._text, self._next)
            assert match is not None
            pieces.append(self._take(match.end() - self._next))
            if self._unread or self.ending is not None:
                return "".join(pieces)
            yield None

    def run_so_far(self, pattern: re.Pattern[str]) -> str:
        """Read what matches of the text that is there, maybe nothing. How much is there must make no difference."""
        match = pattern.match(self._text, self._next)
        return self._take(match.end() - self._next) if match else ""

    def blanks(self) -> Waiting[str]:
        """Read whitespace, as much as there is."""
        return (yield from self.run(_BLANKS))

    def until(self, *ends: str, limit: int | None = None) -> Waiting[tuple[str, str | None]]:
        """Read up to one of some strings, and that string.

        Args:
            limit: characters at most before it; where there are more, nothing is read.

        Returns:
            The text before it, and it; the rest of the text and None where none comes.

        Raises:
            NoCall: the limit is exceeded.
        """
        looked_for = markers(*ends)
        if limit is not None:
            yield from self._check_limit(looked_for, limit)
        pieces = []
        while True:
            text, found = self.read_before(looked_for)
            pieces.append(text)
            if found is not None:
                self._take(len(found))
            if found is not None or self.ending is not None:
                return "".join(pieces), found
            yield None

    def stream_until(self, *ends: str) -> Streaming[str | None]:
        """The same, with the text as it comes. Returns the string that ended it."""
        looked_for = markers(*ends)
        while True:
            text, found = self.read_before(looked_for)
            if text:
                yield text
            if found is not None:
                self._take(len(found))
            if found is not None or self.ending is not None:
                return found
            yield None

    def read_before(self, looked_for: Markers) -> tuple[str, str | None]:
        """Read what certainly stands before the first of some strings, but not that.

        Returns:
            The text, which may be none, and the string if it comes next. Without it, wait before you ask again.
        """
        place, found = looked_for.find(self._text, self._next, more=self.ending is None)
        return self._take(place - self._next), found

    def peek(self, characters: int) -> Waiting[str]:
        """The next characters without reading them; fewer at the end."""
        yield from self._wait_for(characters)
        return self._peek(characters)

    def missing(self) -> None:
        """What belongs here is missing because the text has ended. Raises `NoCall` unless the model ended it itself."""
        if self.ending != "complete":
            raise NoCall

    # --- the buffer -----------------------------------------------------------------------------------------------

    @property
    def _unread(self) -> int:
        return len(self._text) - self._next

    def _peek(self, characters: int) -> str:
        return self._text[self._next : self._next + characters]

    def _wait_for(self, characters: int) -> Waiting[None]:
        while self.ending is None and self._unread < characters:
            yield None

    def _check_limit(self, looked_for: Markers, limit: int) -> Waiting[None]:
        """Wait until it is certain that one of some strings, or the end of the text, comes soon enough."""
        while True:
            stop = self._next + limit + looked_for.longest
            more = self.ending is None and len(self._text) < stop
            place, found = looked_for.find(self._text, self._next, more=more, stop=stop)
            if place - self._next > limit:
                raise NoCall
            if found is not None or not more:
                return
            yield None

    def _take(self, characters: int) -> str:
        taken = self._text[self._next : self._next + characters]
        self._next += characters
        if self._next > _TRIM and 2 * self._next > len(self._text):
            self._drop_read()
        return taken

    def _drop_read(self) -> None:
        if self._mark is not None:
            self._trail.append(self._text[self._mark : self._next])
            self._mark = 0
        self._before = self._text[self._next - 1]
        self._dropped += self._next
        self._text = self._text[self._next :]
        self._next = 0
