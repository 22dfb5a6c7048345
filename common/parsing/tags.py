"""The dialect of most models: tags around thoughts and around calls, everything else is for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from common.parsing import frames
from common.parsing.answer import AnswerParser
from common.parsing.dialect import CallRules, Dialect, ReadOptions, guarded
from common.parsing.formats.base import ToolFormat
from common.parsing.layout import LAYOUT, ContentText, ThoughtText
from common.parsing.pieces import CallBegin, CallEnd, NoCall, Piece, Reading, Thinking, Thought, Waiting
from common.parsing.scanner import Scanner, markers

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_QUOTES: Final = ("`", '"', "'")
_OPENINGS: Final = (*_QUOTES, "(", "[", "{", "<")  # directly before a tag, they make it one that is talked about
_SPACES: Final = (" ", "\t")
_AFTER_MENTION: Final = frozenset(" \t.,;:!?)]}>`\"'<")
# Characters that formats may read in vain, alone and for each character of the answer: so the time to read it does not
# grow with the square of its length, whatever they do.
_READ_AGAIN: Final = 1 << 16
_READ_AGAIN_FACTOR: Final = 16


class TagDialect(Dialect):
    """
    Args:
        tags: that begin and end a thought; None: the model has none, or they are left in its text.
        formats: of calls, the model's own first. Where several begin with the same string, they are tried in turn.
    """

    name = "tags"

    def __init__(self, tags: tuple[str, str] | None, formats: Sequence[ToolFormat]) -> None:
        self.tags = tags
        self.formats = tuple(formats)
        self.starts = {start for format in formats for start in format.starts}
        self.bare_starts = {start for format in formats for start in format.bare_starts}
        self.end_of_thought = f"\n{tags[1]}\n\n" if tags else None

    def read(self, scanner: Scanner, options: ReadOptions) -> Reading[None]:
        return _TagReader(self, scanner, options).read(in_thought=options.in_thought)

    def begins_in_thought(self, prompt: str, given: int = 0) -> bool:
        if self.tags is None:
            return False
        template = prompt[: len(prompt) - given]
        parser = AnswerParser(self, ReadOptions(in_thought=template.rstrip().endswith(self.tags[0])))
        parser.feed(prompt[len(template) :])
        return parser.thinking

    def frame(self, grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
        return frames.tags(self.tags, self.formats, grammar, calls, answer=answer, in_thought=in_thought)

    def formats_at(self, marker: str) -> list[ToolFormat]:
        """Those that may begin where a marker stands."""
        return [format for format in self.formats if marker.startswith(format.starts)]


class _Held(NamedTuple):
    """A part of a thought that may still become a call."""

    text: str
    call: Sequence[Piece] = ()  # none: just text


class _TagReader:
    """Reads one answer."""

    def __init__(self, dialect: TagDialect, scanner: Scanner, options: ReadOptions) -> None:
        self._dialect = dialect
        self._scanner = scanner
        self._tools = options.tools
        self._opening, self._closing = dialect.tags or ("", "")
        tags = dialect.tags or ()
        starts = dialect.starts if options.tools else set()
        marked = starts - dialect.bare_starts
        self._at_beginning = markers(*tags, *starts)
        self._in_content = markers(*tags, *marked)
        self._in_thoughts = markers(*tags, *(marked if options.calls_in_thoughts else ()))
        self._content = ContentText(scanner, calls=bool(starts))
        self._thoughts = ThoughtText()
        self._held: list[_Held] = []  # the thoughts from the first call in one of them
        self._mentioned = False  # the last that came, blanks aside, is the start of a call that is talked about
        self._read_again = 0  # characters that were taken for a call in vain
        self._no_call_before = 0  # position up to which it is known that what begins in a thought is no call

    def read(self, *, in_thought: bool) -> Reading[None]:
        if in_thought and self._dialect.tags:
            yield from self._content.thought()
            yield from self._read_thought(opened=False)
        while (yield from self._read_content()):
            yield from self._read_thought(opened=True)
        yield from self._settle(calls=True)

    # --- content --------------------------------------------------------------------------------------------------

    def _read_content(self) -> Reading[bool]:
        """Read up to the opening tag of a thought, and that. Returns whether there is one."""
        scanner = self._scanner
        self._mentioned = False
        while True:
            text, marker = scanner.read_before(self._at_beginning if self._content.fresh else self._in_content)
            if text:
                self._mentioned = self._mentioned and not text.strip(LAYOUT)
                yield from self._say(text)
            if marker in self._dialect.bare_starts and not self._content.fresh:
                continue  # behind the text that has just come it means nothing
            if marker is None:
                if scanner.ending is not None:
                    yield from self._content.end()
                    return False
                yield None
            elif marker == self._opening:
                if self._content.fresh or not (yield from self._is_tag_mention()):
                    yield from self._content.thought()
                    yield from scanner.accept(marker)
                    return True
                yield from scanner.accept(marker)
                yield from self._say(marker)
            elif marker == self._closing and self._content.fresh:
                yield from self._content.thought()
                yield from scanner.accept(marker)
            elif marker == self._closing or not (yield from self._read_calls(marker)):
                yield from scanner.accept(marker)
                yield from self._say(marker)

    def _say(self, text: str) -> Iterable[Piece]:
        """Text for the user, which has just been read."""
        content = self._content.text(text)
        return [*self._settle(calls=False), *content] if self._held and content else content

    def _is_tag_mention(self) -> Waiting[bool]:
        """Whether an opening tag amid content is talked about, and opens nothing."""
        before = self._scanner.last
        if before in _OPENINGS:
            return True
        if before not in _SPACES:
            return False
        after = (yield from self._scanner.peek(len(self._opening) + 1))[len(self._opening) :]
        return after in _AFTER_MENTION

    def _read_calls(self, marker: str) -> Reading[bool]:
        """Read a block of calls. Returns whether there is any; otherwise nothing is read."""
        scanner = self._scanner
        if self._is_passed_over():
            return False
        for format in self._dialect.formats_at(marker):
            begun = complete = False
            start = scanner.position
            scanner.mark()
            try:
                for piece in guarded(format.read(scanner, self._tools)):
                    if isinstance(piece, CallBegin):
                        yield from self._settle(calls=False)  # it was thought of before it is made
                        begun = True
                    yield piece
                    if isinstance(piece, CallEnd):
                        begun, complete = False, True
                        self._content.call(start)
                        scanner.mark()
                if begun or not complete:
                    raise NoCall
            except NoCall:
                if begun:
                    yield CallEnd(complete=False)
                    text = scanner.since_mark()
                    scanner.unmark()
                    yield from self._say(text)
                    return True
                self._go_back()
            else:
                scanner.unmark()
            if complete:
                yield from self._drop_cut_mark(format)
                return True
        return False

    def _drop_cut_mark(self, format: ToolFormat) -> Waiting[None]:
        """Read what an answer that was cut off behind a complete call has of the marks that end it."""
        scanner = self._scanner
        if scanner.ending == "cut":
            scanner.mark()
            rest, _ = yield from scanner.until()
            if rest.strip(LAYOUT) in format.ending:
                scanner.unmark()
            else:
                scanner.rewind()

    def _is_passed_over(self) -> bool:
        """Whether the start of a call that comes next is talked about, or belongs to the rest of an example that is; or
        whether formats have looked for calls in vain so often that it would take too long."""
        self._mentioned = self._mentioned or self._scanner.last == "`"
        return self._mentioned or self._read_again > _READ_AGAIN + _READ_AGAIN_FACTOR * self._scanner.position

    def _go_back(self) -> None:
        end = self._scanner.position
        self._scanner.rewind()
        self._read_again += end - self._scanner.position

    # --- thoughts -------------------------------------------------------------------------------------------------

    def _read_thought(self, *, opened: bool) -> Reading[None]:
        """Read up to the closing tag, and that.

        Args:
            opened: by the answer, not by the prompt, which a model may overlook.
        """
        yield Thinking(True)
        scanner = self._scanner
        self._mentioned = False
        fresh = not opened
        while True:
            text, marker = scanner.read_before(self._in_thoughts)
            if text:
                self._mentioned = self._mentioned and not text.strip(LAYOUT)
                fresh = fresh and not text.strip(LAYOUT)
                yield from self._think(text)
            if marker is None:
                if scanner.ending is not None:
                    break
                yield None
            elif marker == self._closing:
                before = scanner.last
                yield from scanner.accept(marker)
                if not (before in _QUOTES and (yield from scanner.peek(1)) == before):
                    yield Thinking(False)
                    break
                yield from self._think(marker)
            elif marker == self._opening and fresh:
                yield from scanner.accept(marker)
                fresh = False
            elif marker == self._opening or not (yield from self._read_calls_in_thought(marker)):
                yield from scanner.accept(marker)
                yield from self._think(marker)
        if not self._held:
            yield from self._thoughts.end()

    def _think(self, text: str) -> Iterator[Thought]:
        if self._held:
            self._held.append(_Held(text))
        else:
            yield from self._thoughts.text(text)

    def _read_calls_in_thought(self, marker: str) -> Reading[bool]:
        """Read a block of calls and hold it. Returns whether there is any; otherwise nothing is read."""
        scanner = self._scanner
        if self._is_passed_over() or scanner.position < self._no_call_before:
            return False
        for format in self._dialect.formats_at(marker):
            held: list[_Held] = []
            call: list[Piece] = []
            scanner.mark()
            try:
                for piece in guarded(format.read(scanner, self._tools)):
                    if piece is None:
                        yield None
                        continue
                    call.append(piece)
                    if isinstance(piece, CallEnd):
                        held.append(_Held(scanner.since_mark(), call))
                        call = []
                        scanner.mark()
                if call or not held:
                    raise NoCall
            except NoCall:
                # Unlike in content, nothing is given out yet, so the end of the thought may be found in its text. That
                # it is read again does not make anything slow, because nothing in it is tried again.
                self._no_call_before = max(self._no_call_before, scanner.position if call else 0)
                self._go_back()
            else:
                held[-1] = held[-1]._replace(text=held[-1].text + scanner.since_mark())
                scanner.unmark()
            if held:
                self._held += held
                return True
        return False

    def _settle(self, *, calls: bool) -> Iterator[Piece]:
        """Give out what is held, as calls or as what the model has thought."""
        if not self._held:
            return
        text: list[str] = []
        for part in self._held:
            if calls and part.call:
                yield from self._thoughts.text("".join(text))
                text = []
                self._thoughts.call()
                yield from part.call
            else:
                text.append(part.text)
        self._held = []
        yield from self._thoughts.text("".join(text))
        yield from self._thoughts.end()
