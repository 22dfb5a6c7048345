"""Errors and streams, as Anthropic's API writes them."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final, Literal, TypedDict

from common.errors import ContextLengthExceeded, ServerError
from common.logger import request_id
from endpoints.errors import error_responses
from endpoints.wire import NamedEvent, Wire

_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
# As `validate_context_requirements()` tells them.
_TOKENS: Final = re.compile(r"has (\d+) tokens.* at most (\d+) ")


class ErrorObject(TypedDict):
    type: str
    message: str


class ErrorBody(TypedDict):
    type: Literal["error"]
    error: ErrorObject
    request_id: str


# For the OpenAPI document: the responses of every route of this API.
_TEXT: Final[dict[str, Any]] = {"type": "string"}
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]},
        "request_id": _TEXT,
    },
    "required": ["type", "error", "request_id"],
}
ERROR_RESPONSES: Final = error_responses(_SCHEMA)


def anthropic_error(error: ServerError) -> ErrorBody:
    return {
        "type": "error",
        "error": {"type": _type_of(error), "message": _message_of(error)},
        "request_id": request_id.get(),
    }


def _type_of(error: ServerError) -> str:
    client_is_wrong = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return _TYPES.get(HTTPStatus(error.status), "invalid_request_error" if client_is_wrong else "api_error")


def _message_of(error: ServerError) -> str:
    """Agents know by its beginning that they have to shorten their conversation."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    tokens = _TOKENS.search(error.message)
    numbers = f": {tokens[1]} tokens > {tokens[2]} maximum" if tokens else ""
    return f"prompt is too long{numbers}. {error.message}"


ANTHROPIC: Final = Wire(anthropic_error, error_event="error", ping=NamedEvent("ping", '{"type":"ping"}'))
