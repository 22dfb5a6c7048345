"""How Kobold's API writes streams and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from sse_starlette import ServerSentEvent

from common.errors import RequestCancelled, ServerError
from endpoints.errors import ERROR_SCHEMA, error_responses, openai_error
from endpoints.Kobold.types.generate import KoboldToken
from endpoints.Kobold.utils.generations import Generation
from endpoints.wire import NamedEvent, Payload, Wire

_LINE_END = "\n"  # Kobold Lite wants lines to end in LF alone
_DETAIL: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"msg": {"type": "string"}, "type": {"type": "string"}},
    "required": ["msg", "type"],
}
ERROR_RESPONSES: Final = error_responses(
    {
        "type": "object",
        "properties": {"error": ERROR_SCHEMA["properties"]["error"], "detail": _DETAIL},
        "required": ["error", "detail"],
    }
)


def kobold_error(error: ServerError) -> Mapping[str, object]:
    """KoboldAI's object, and the one that front ends of several APIs look for."""
    return {"detail": {"msg": error.message, "type": error.type}, **openai_error(error)}


def message(piece: KoboldToken) -> NamedEvent:
    # ASCII, since Kobold Lite takes a line separator in the text for the end of the event.
    return NamedEvent("message", piece.model_dump_json(ensure_ascii=True))


async def aborted() -> AsyncIterator[NamedEvent]:
    """The stream of an answer that was aborted before there was any of it."""
    yield message(KoboldToken(token="", finish_reason="abort"))


class KoboldWire(Wire):
    """A stream ends with the event that has a `finish_reason`.

    Args:
        generation: whose abort is an end and no error, from the beginning of the stream on.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(kobold_error, error_event="error")
        self._generation = generation

    def frame(self, payload: Payload) -> bytes:
        name, data = payload if isinstance(payload, NamedEvent) else ("message", payload)
        return f"event: {name}{_LINE_END}data: {data}{_LINE_END * 2}".encode()

    def error(self, error: ServerError) -> Payload:
        if self._generation.aborted and isinstance(error, RequestCancelled):
            return message(KoboldToken(token="", finish_reason="abort"))
        return super().error(error)

    @property
    def ping(self) -> Callable[[], ServerSentEvent]:
        return lambda: ServerSentEvent(comment="ping", sep=_LINE_END)
