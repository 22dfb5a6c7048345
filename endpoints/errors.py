"""Errors as responses: whatever a route raises becomes a `ServerError`, which each API renders in its own envelope."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any, Final, NotRequired, TypeAlias, TypedDict, TypeVar

from fastapi.exceptions import RequestValidationError
from loguru import logger
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import InvalidRequest, MethodNotAllowed, NotFound, ServerError
from common.logger import request_id

M = TypeVar("M", bound=BaseModel)

MAX_PROBLEMS_SHOWN = 3
MAX_INPUT_SHOWN = 80
_SUBJECT = re.compile("^[A-Z][a-z]+ should")  # "Input", "String", "List", for which the path of the field stands here
# pydantic speaks of Python's types.
_JSON_WORDS = {
    "dict_type": "should be an object",
    "list_type": "should be a list",
    "model_attributes_type": "should be an object",
    "model_type": "should be an object",
}


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: ErrorObject
    detail: NotRequired[str]  # TabbyAPI's own routes: the message once more, where its front ends look for it


RenderError: TypeAlias = Callable[[ServerError], Mapping[str, object]]  # a JSON object, in the form of an API

# For the OpenAPI document, as the component "Error".
ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "Path of the field at fault."},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        },
        "detail": {"type": "string", "description": "The message once more, of TabbyAPI's own routes."},
    },
    "required": ["error"],
}


def error_responses(schema: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The errors of a route in the OpenAPI document.

    Args:
        schema: of the envelope that its API has.
    """
    content = {"application/json": {"schema": schema}}
    return {
        "4XX": {"description": "The request cannot be served as it is.", "content": content},
        "5XX": {"description": "The server cannot serve it, or not now.", "content": content},
    }


ERROR_RESPONSES: Final = error_responses({"$ref": "#/components/schemas/Error"})  # where a router has no others


def openai_error(error: ServerError) -> ErrorBody:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def core_error(error: ServerError) -> ErrorBody:
    return {**openai_error(error), "detail": error.message}


def dump_json(value: object) -> str:
    """Compact JSON that can be encoded as UTF-8, whatever text a request brought in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode("utf-8")


def error_response(error: ServerError, render: RenderError) -> Response:
    """A whole response, for an error that comes before anything was sent."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == HTTPStatus.REQUEST_TIMEOUT:  # what would still come of the request is no other one
        headers["Connection"] = "close"
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(dump_json(render(error)), error.status, headers, media_type="application/json")


def to_server_error(error: Exception) -> ServerError:
    """The error that a client is told. What nobody expected is logged here, and told without details."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _from_http(error)
    logger.opt(exception=error).error("A request failed for a reason that the server does not know")
    return ServerError(f"The server failed on this request. Its log says more, under the id {request_id.get()}.")


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """An object that is made of a request's fields, where it is none of them that FastAPI has checked.

    Raises:
        InvalidRequest: the model refuses them.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise _from_validation(RequestValidationError(problems, body=values)) from error


def _from_http(error: HTTPException) -> ServerError:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NotFound("There is no such route. The API lives under /v1; /docs lists what there is.")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed("The route does not take this HTTP method; the header Allow names those that it does.")
    failure = (InvalidRequest if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else ServerError)(error.detail)
    failure.status = error.status_code
    return failure


def _from_validation(error: RequestValidationError) -> InvalidRequest:
    problems: dict[str, str] = {}  # path -> what is wrong there; a union reports one path once per member
    for item in error.errors():
        where, *location = item["loc"]
        if item["type"] == "json_invalid":
            return InvalidRequest(f"The body is not valid JSON: {item['ctx']['error']} at character {location[0]}.")
        if where == "body" and not location:
            return InvalidRequest("The route needs a JSON object as its body, with Content-Type: application/json.")
        data = error.body if where == "body" else None
        path = ".".join(str(part) for part in _existing_path(location, data, item["type"] == "missing"))
        problems.setdefault(path, _problem(path, item["msg"], item["type"], item.get("input")))
    # A union reports what each of its members finds wrong: the one that got furthest is the one that was meant.
    problems = {
        path: text for path, text in problems.items() if not any(other.startswith(f"{path}.") for other in problems)
    }
    shown = list(problems.values())[:MAX_PROBLEMS_SHOWN]
    more = len(problems) - len(shown)
    message = "; ".join(shown) + (f"; and {more} more problems." if more else ".")
    return InvalidRequest(message, param=next(iter(problems)))


def _existing_path(location: Sequence[str | int], data: Any, missing: bool) -> list[str | int]:
    """The part of a validator's location that names places in the body, without the union members it tried."""
    path: list[str | int] = []
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            if not missing or part != location[-1]:
                continue
        path.append(part)
    return path or list(location[:1])


def _problem(path: str, text: str, kind: str, given: object) -> str:
    if kind == "missing":
        return f"{path} is missing"
    text = _JSON_WORDS.get(kind) or _SUBJECT.sub("should", text.removeprefix("Value error, "))
    if kind.endswith(("_parsing", "_from_float")) or kind in ("too_short", "too_long"):
        text = text.partition(",")[0]  # why it is none, which what was given shows as well
        text = text.removesuffix(" after validation")
    if kind == "too_long" and isinstance(given, (list, dict)):
        return f"{path} {text}, not {len(given)}"
    shown = json.dumps(_excerpt(given), ensure_ascii=False, default=str)
    if len(shown) > MAX_INPUT_SHOWN:
        shown = shown[:MAX_INPUT_SHOWN] + "…"
    return f"{path} {text}, not {shown}"


def _excerpt(value: object) -> object:
    """As much of a value as can be shown, so that a large one does not take long to be shown."""
    if isinstance(value, str):
        return value[: MAX_INPUT_SHOWN + 1]
    if isinstance(value, list):
        return [_excerpt(item) for item in value[:MAX_INPUT_SHOWN]]
    if isinstance(value, dict):
        return {name: _excerpt(item) for name, item in islice(value.items(), MAX_INPUT_SHOWN)}
    return value
