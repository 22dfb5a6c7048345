"""Routes that say who may use them, and that check it before they read the body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute, iter_route_contexts
from loguru import logger
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from common.auth import ADMINISTRATOR, Caller
from common.errors import AuthenticationFailed, InvalidRequest, ServerError
from common.json_body import SMALL_BODY, read_json
from endpoints.admission import Place
from endpoints.errors import core_error, error_response, openai_error, to_server_error
from endpoints.prompt_thread import prompt_owner
from endpoints.request_log import record_request
from endpoints.state import leases_of, state_of
from endpoints.streaming import unless_disconnected

Level: TypeAlias = Literal["none", "api", "admin"]
Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

VERSION_PREFIX: Final = "/v1"
_LEVEL: Final = "x-access-level"
# Given to a route as its `openapi_extra`, so that the level stands in the OpenAPI document as well.
OPEN: Final[dict[str, Any]] = {_LEVEL: "none", "security": []}
API: Final[dict[str, Any]] = {_LEVEL: "api", "security": [{"bearer": []}, {"x-api-key": []}]}
ADMIN: Final[dict[str, Any]] = {_LEVEL: "admin", "security": [{"bearer": []}, {"x-admin-key": []}]}
SECURITY_SCHEMES: Final[dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-admin-key": {"type": "apiKey", "in": "header", "name": "x-admin-key"},
}
# What nginx logs for it; it reaches nobody.
CLIENT_CLOSED_REQUEST = 499


class JsonRequest(Request):
    async def json(self) -> Any:
        """The body, read once; see `read_json()`."""
        if not hasattr(self, "_json"):
            body = await self.body()
            small = len(body) <= SMALL_BODY
            try:
                self._json = read_json(body) if small else await asyncio.to_thread(read_json, body)
            except InvalidRequest as error:  # of which FastAPI would not pass on what it says
                raise HTTPException(HTTPStatus.BAD_REQUEST, error.message) from error
        return self._json


class ApiRoute(APIRoute):
    """A route with an access level and its API's error envelope. `openapi_extra` must be `OPEN`, `API` or `ADMIN`."""

    @staticmethod
    def render_error(error: ServerError) -> Mapping[str, object]:
        """The envelope of the API that the route belongs to."""
        raise NotImplementedError

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        level = level_of(self)

        async def guarded(request: Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            try:
                if (caller := authorise(request, level)) is not None:
                    request.state.permission, request.state.owner = caller
                    prompt_owner.set(caller.owner)
                    state_of(request).refuse_when_stopping()
                    await request.body()  # here, where what goes wrong with it is told as it is
                    await record_request(request, state_of(request).settings.logging)
                return await self.serve(request, handle)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                failure = to_server_error(error)
                # What a request got wrong is quoted to its sender only: it may be part of a prompt.
                what = failure.param if isinstance(failure, InvalidRequest) else failure.message
                # Open routes are asked over and over by whatever watches the server.
                logger.log("DEBUG" if level == "none" else "INFO", "Not served: {} ({})", failure.code, what)
                state_of(request).metrics.http_errors.labels(self.path, failure.code).inc()
                response = error_response(failure, self.render_error)
                if state_of(request).stopping:
                    response.headers["Connection"] = "close"
                return response

        return guarded

    async def serve(self, request: Request, handle: Handler) -> Response:
        """Have the request handled, whose key has been checked and whose body is there."""
        return await handle(request)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        finally:
            for lease in leases_of(Request(scope)):
                lease.release()


class WatchedRoute(ApiRoute):
    """A route whose work is given up when its client goes away. What a stream does is up to the stream."""

    async def serve(self, request: Request, handle: Handler) -> Response:
        return await unless_disconnected(request, handle(request))


class QueuedRoute(WatchedRoute):
    """A route whose requests wait for the model. Each has a place in the queue until its response is sent."""

    async def serve(self, request: Request, handle: Handler) -> Response:
        place = request.state.place = state_of(request).queue.enter(request.state.owner)
        return await place.hold(super().serve(request, handle))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        finally:
            place: Place | None = getattr(Request(scope).state, "place", None)
            if place is not None:
                place.leave()


class AnyTypeRoute(ApiRoute):
    """A route that takes every body for JSON, whatever its Content-Type: curl calls it a form where it is not told."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def as_json(request: Request) -> Response:
            MutableHeaders(scope=request.scope)["Content-Type"] = "application/json"
            return await handle(request)

        return as_json


class CoreRoute(ApiRoute):
    render_error = staticmethod(core_error)


class CoreWatchedRoute(WatchedRoute, CoreRoute):
    pass


class OpenAIRoute(ApiRoute):
    render_error = staticmethod(openai_error)


class OpenAIQueuedRoute(QueuedRoute, OpenAIRoute):
    pass


def level_of(route: APIRoute) -> Level:
    level: Level = (route.openapi_extra or {})[_LEVEL]
    return level


def authorise(request: Request, level: Level) -> Caller | None:
    """Who asks; None on an open route.

    Raises:
        AuthenticationFailed: not what the level asks for.
    """
    if level == "none":
        return None
    keys = state_of(request).keys
    caller = ADMINISTRATOR if keys is None else keys.identify(request.headers)
    if level == "admin" and caller.permission != "admin":
        raise AuthenticationFailed("This route needs the admin key; the key sent is an API key.")
    return caller


class RouteAccess(NamedTuple):
    """
    Attributes:
        alias: the same route is there below /v1, which is how it is documented.
    """

    method: str
    path: str
    level: Level
    alias: bool


def route_table(app: FastAPI) -> list[RouteAccess]:
    """Every route of the application and who may use it; the documentation's table is made from it."""
    contexts = list(iter_route_contexts(app.routes))
    paths = {context.path for context in contexts}
    table = []
    for context in contexts:
        path, extra = context.path or "", getattr(context, "openapi_extra", None) or OPEN
        alias = VERSION_PREFIX + path in paths
        table += [RouteAccess(method, path, extra[_LEVEL], alias) for method in context.methods or ()]
    return sorted(table, key=lambda row: (row.path, row.method))


def methods_of(app: FastAPI, path: str) -> list[str]:
    """The methods that some route takes at a path."""
    contexts = [context for context in iter_route_contexts(app.routes) if context.path_regex.match(path)]
    return sorted({method for context in contexts for method in context.methods or ()})
