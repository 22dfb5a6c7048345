"""How the APIs write their streams: frames, signs of life, errors, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from sse_starlette import ServerSentEvent

from common.errors import ServerError
from endpoints.errors import RenderError, core_error, dump_json, openai_error

DONE: Final = "[DONE]"


class NamedEvent(NamedTuple):
    """A server-sent event that says in a line of its own what it is."""

    name: str
    data: str


# JSON without line breaks, for one event.
Payload: TypeAlias = str | NamedEvent


class Wire:
    """Server-sent events of an API.

    Attributes:
        media_type: of the response.
        pings: there is something to send while there is nothing to say.
        terminator: the last event of every stream; None for APIs that have none.

    Args:
        render_error: the body of an error.
        error_event: name of the event that an error in a stream is; None where events have no names.
        ping: an event that keeps the connection alive; None: a comment does.
    """

    media_type: str = "text/event-stream"
    pings: bool = True

    def __init__(
        self,
        render_error: RenderError,
        *,
        terminator: str | None = None,
        error_event: str | None = None,
        ping: NamedEvent | None = None,
    ) -> None:
        self.terminator = terminator
        self._render_error = render_error
        self._error_event = error_event
        self._ping = ping

    def frame(self, payload: Payload) -> bytes:
        if isinstance(payload, str):
            return f"data: {payload}\r\n\r\n".encode()
        return f"event: {payload.name}\r\ndata: {payload.data}\r\n\r\n".encode()

    def error(self, error: ServerError) -> Payload:
        """What tells of an error in a stream that has begun."""
        data = dump_json(self._render_error(error))
        return data if self._error_event is None else NamedEvent(self._error_event, data)

    @property
    def ping(self) -> Callable[[], ServerSentEvent] | None:
        """Makes what keeps a connection alive; None for the comment that sse-starlette sends."""
        ping = self._ping
        return None if ping is None else lambda: ServerSentEvent(event=ping.name, data=ping.data)


class LineWire(Wire):
    """One JSON object in a line. Clients read nothing else, so there are no pings."""

    media_type = "application/x-ndjson"
    pings = False

    def frame(self, payload: Payload) -> bytes:
        return f"{payload if isinstance(payload, str) else payload.data}\n".encode()


OPENAI: Final = Wire(openai_error, terminator=DONE)
CORE: Final = Wire(core_error, terminator=DONE)
LLAMA_CPP: Final = Wire(openai_error)  # a stream ends with the event that says `"stop": true`
