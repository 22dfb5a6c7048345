"""What wraps every request: its id and its line in the log, how large it may be, and how long it may take to come."""

from __future__ import annotations

import asyncio
import re
from time import perf_counter
from typing import Final
from uuid import uuid4

from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BodyTimeout, InvalidRequest, RequestTooLarge
from common.logger import request_id
from endpoints.errors import core_error, error_response, to_server_error
from endpoints.request_log import as_json, redact_headers

HEADER: Final = "X-Request-Id"
MAX_PATH_SHOWN: Final = 200  # characters, in the log
_ACCEPTABLE_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Asked for every few seconds by whatever watches over the server.
_PROBES: Final = ("/health", "/ping", "/ready", "/metrics")


class RequestContextMiddleware:
    """Gives every request an id, the client's own where it is fit for a log, sends it back, and logs the outcome.

    What fails outside of a route, which would render it, is rendered here. A request that leaves open where it ends is
    refused: a proxy in front of the server may see another end, and what follows it as somebody else's request.

    Args:
        log_headers: log the request's headers too, when it arrives.
    """

    def __init__(self, app: ASGIApp, *, log_headers: bool = False) -> None:
        self._app = app
        self._log_headers = log_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        identity = given if _ACCEPTABLE_ID.fullmatch(given) else uuid4().hex
        status: int | None = None
        ambiguous = "transfer-encoding" in headers and "content-length" in headers

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = identity
                if ambiguous:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        path = scope["path"][:MAX_PATH_SHOWN]
        level = "DEBUG" if path in _PROBES else "INFO"
        started = perf_counter()
        token = request_id.set(identity)
        if self._log_headers:
            shown = as_json(redact_headers(headers))
            logger.log(level, "{} {!r} with headers {}", scope["method"], path, shown)
        try:
            if ambiguous:
                raise InvalidRequest("A request may have a Content-Length or a Transfer-Encoding, but not both.")
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:  # too late for another response: the connection is closed instead
                raise
            await error_response(to_server_error(error), core_error)(scope, receive, send_with_id)
        finally:
            seconds = perf_counter() - started
            logger.log(level, "{} {!r}: {} in {:.3f} s", scope["method"], path, status, seconds)
            request_id.reset(token)


class BodyLimitMiddleware:
    """Refuses a body above a size when it is read: after the key was checked, and in the envelope of the route's API.

    Starlette's own limit answers before the route does, in plain text. uvicorn discards what is left of a refused body,
    so that its connection can be used again.

    Args:
        limit: MB.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = self._limit * 1024 * 1024
        declared = Headers(scope=scope).get("content-length", "")
        refused = declared.isdecimal() and int(declared) > left

        async def receive_within_limit() -> Message:
            nonlocal left
            if not refused:
                message = await receive()
                left -= len(message.get("body", b""))
                if left >= 0:
                    return message
            raise RequestTooLarge(
                f"The body of the request is larger than {self._limit} MB; network.max_body_mb sets that limit."
            )

        await self._app(scope, receive_within_limit, send)


class BodyTimeoutMiddleware:
    """Refuses a body that does not come, when it is read: as `BodyLimitMiddleware` does. The connection is closed then.

    Args:
        limit: seconds that may pass between two pieces of it.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        complete = False

        async def receive_in_time() -> Message:
            nonlocal complete
            if complete:  # from now on it is waited for the client to go
                return await receive()
            try:
                async with asyncio.timeout(self._limit):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout(
                    f"Nothing more of the request's body has come for {self._limit} s; network.body_timeout sets that "
                    "limit."
                ) from None
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)
