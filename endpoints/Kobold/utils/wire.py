"""How Kobold's API writes streams and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.errors import ServerError
from endpoints.errors import openai_error
from endpoints.wire import NamedEvent, Payload, Wire


def kobold_error(error: ServerError) -> Mapping[str, object]:
    """KoboldAI's object, and the one that front ends of several APIs look for."""
    return {"detail": {"msg": error.message, "type": error.type}, **openai_error(error)}


class _KoboldWire(Wire):
    """Kobold Lite wants lines to end in LF alone."""

    def frame(self, payload: Payload) -> bytes:
        name, data = payload if isinstance(payload, NamedEvent) else ("message", payload)
        return f"event: {name}\ndata: {data}\n\n".encode()


# A stream ends with the event that has a `finish_reason`.
KOBOLD: Final = _KoboldWire(kobold_error, error_event="error")
