"""How Ollama's API writes streams and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.errors import ServerError
from endpoints.errors import error_responses
from endpoints.wire import LineWire

ERROR_RESPONSES: Final = error_responses(
    {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
)


def ollama_error(error: ServerError) -> Mapping[str, object]:
    return {"error": error.message}


OLLAMA: Final = LineWire(ollama_error)  # a stream ends with the line that says `"done": true`
