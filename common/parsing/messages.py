"""What the dialects have in common that write an answer as a series of messages, each with a header and a body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, Literal, NamedTuple

from common.parsing.dialect import ReadOptions, guarded
from common.parsing.layout import ThoughtText
from common.parsing.pieces import CallBegin, CallEnd, Content, NoCall, Piece, Reading, Thinking, Waiting
from common.parsing.scanner import Scanner, markers

START: Final = "<|start|>"
MESSAGE: Final = "<|message|>"
RECIPIENT: Final = "to="
_HEADER_LENGTH: Final = 512  # characters between two of its tokens


class Message(NamedTuple):
    """What a header says.

    Attributes:
        recipient: of calls.
        header: its text, from the first token to the last.
    """

    kind: Literal["content", "thought", "calls", "none"]
    recipient: str = ""
    header: str = ""


_NO_MESSAGE: Final = Message("none")


class MessageReader(ABC):
    """Reads one answer. It begins in a header, inside a thought, or with text for the user.

    Attributes:
        header: tokens that a header begins with or has in it, beside `<|message|>` at its end; each once at most.
        ends: tokens that end a body.
    """

    header: ClassVar[Sequence[str]]
    ends: ClassVar[Sequence[str]]

    def __init__(self, scanner: Scanner, options: ReadOptions) -> None:
        self.scanner = scanner
        self.tools = options.tools
        self._in_thought = options.in_thought
        self._tokens = markers(*self.header, MESSAGE, *self.ends)
        self._thoughts = ThoughtText()
        self._blanks = ""  # read between two messages; layout unless text follows

    @staticmethod
    @abstractmethod
    def message(header: str, *, amid_text: bool) -> Message | None:
        """What a header says, from its first token to `<|message|>`. None: it is none.

        Args:
            amid_text: it stands in the body of another message, which may only talk about it.
        """

    @abstractmethod
    def calls(self, recipient: str) -> Reading[None]:
        """Read the calls in a body, see `ToolFormat.read()`."""

    def read(self) -> Reading[None]:
        message: Message | None = Message("thought") if self._in_thought else (yield from self._first_message())
        while message is not None:
            message = yield from self._read_message(message)

    def _first_message(self) -> Waiting[Message]:
        self.scanner.mark()
        yield from self.scanner.blanks()
        begun = yield from self.scanner.ahead(RECIPIENT, MESSAGE, *self.header)
        self.scanner.rewind()
        if not begun:
            return Message("content")
        message = yield from self._read_header(amid_text=False)
        return message or Message("none" if (yield from self._drop_cut_header()) else "content")

    def _read_header(self, *, amid_text: bool) -> Waiting[Message | None]:
        """Read the header that begins here. Where none does, nothing is read."""
        self.scanner.mark()
        token: str | None = None
        try:
            for _ in range(len(self.header) + 1):
                _, token = yield from self.scanner.until(*self._tokens.strings, limit=_HEADER_LENGTH)
                if token not in self.header:
                    break
        except NoCall:
            token = None
        message = self.message(self.scanner.since_mark(), amid_text=amid_text) if token == MESSAGE else None
        if message is None:
            self.scanner.rewind()
        else:
            self.scanner.unmark()
        return message

    def _drop_cut_header(self) -> Waiting[bool]:
        """Read a header in which an answer was cut off. Returns whether there is one; otherwise nothing is read."""
        scanner = self.scanner
        scanner.mark()
        try:
            text, token = yield from scanner.until(MESSAGE, limit=_HEADER_LENGTH)
        except NoCall:
            text, token = "", None
        is_cut = token is None and scanner.ending == "cut" and bool(text)
        if is_cut and any(text.startswith(mark) or mark.startswith(text) for mark in (*self.header, *self.ends)):
            scanner.unmark()
            return True
        scanner.rewind()
        return False

    def _read_message(self, message: Message) -> Reading[Message | None]:
        """Read a body. Returns the message that follows; None at the end of the text."""
        match message.kind:
            case "thought":
                yield Thinking(True)
                following = yield from self._read_body(message)
                if following is not None:
                    yield Thinking(False)
                yield from self._thoughts.end()
                return following
            case "calls":
                if (yield from self._read_calls(message)):
                    message = Message("content")
            case "none":
                self._blanks = yield from self.scanner.blanks()
                if (yield from self._drop_cut_header()):
                    return None
        following = yield from self._read_body(message)
        self._blanks = ""
        return following

    def _read_body(self, message: Message) -> Reading[Message | None]:
        while True:
            text, token = self.scanner.read_before(self._tokens)
            if text:
                yield from self._say(message, text)
            if token is None:
                if self.scanner.ending is not None:
                    return None
                yield None
            elif token in self.ends:
                yield from self.scanner.accept(token)
                if message.kind == "calls":
                    yield from self._say(message, token)
                return _NO_MESSAGE
            else:
                if token in self.header or message.kind == "none":
                    following = yield from self._read_header(amid_text=message.kind != "none")
                    if following is not None:
                        return following
                yield from self.scanner.accept(token)
                yield from self._say(message, token)

    def _say(self, message: Message, text: str) -> Iterator[Piece]:
        """Text which has just been read."""
        if message.kind == "thought":
            yield from self._thoughts.text(text)
        else:
            text = self._blanks + text
            self._blanks = ""
            yield Content(text, self.scanner.position - len(text))

    def _read_calls(self, message: Message) -> Reading[bool]:
        """Read the calls in a body. Returns whether there are any; otherwise its text so far, header and all, is given
        out as content, and so is the rest to be."""
        begun = complete = False
        self.scanner.mark()
        try:
            for piece in guarded(self.calls(message.recipient)):
                begun = begun or isinstance(piece, CallBegin)
                yield piece
                if isinstance(piece, CallEnd):
                    begun, complete = False, True
                    self.scanner.mark()
            if begun or not complete:
                raise NoCall
        except NoCall:
            header = "" if complete else message.header
            if begun:
                yield CallEnd(complete=False)
                text = header + self.scanner.since_mark()
                self.scanner.unmark()
                yield from self._say(message, text)
            else:
                self.scanner.rewind()
                if header:
                    yield from self._say(message, header)
            return complete
        self.scanner.unmark()
        return True


def ends_in_thought(prompt: str, reader: type[MessageReader]) -> bool:
    header, token, body = prompt[max(prompt.rfind(START), 0) :].partition(MESSAGE)
    message = reader.message(header + token, amid_text=False)
    return message is not None and message.kind == "thought" and not any(end in body for end in reader.ends)
