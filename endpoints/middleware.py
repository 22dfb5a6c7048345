"""What wraps every request: its id and its line in the log, how large it may be, and which web pages may send it."""

from __future__ import annotations

import re
from time import perf_counter
from typing import Final
from uuid import uuid4

from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import RequestTooLarge
from common.logger import request_id
from endpoints.errors import core_error, error_response, to_server_error
from endpoints.request_log import as_json, redact_headers

HEADER: Final = "X-Request-Id"
_ACCEPTABLE_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Asked for every few seconds by whatever watches over the server.
_PROBES: Final = ("/health", "/ping", "/ready", "/metrics")
LOOPBACK_ORIGINS: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class RequestContextMiddleware:
    """Gives every request an id, the client's own where it is fit for a log, sends it back, and logs the outcome.

    What fails outside of a route, which would render it, is rendered here.

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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = identity
            await send(message)

        level = "DEBUG" if scope["path"] in _PROBES else "INFO"
        started = perf_counter()
        token = request_id.set(identity)
        if self._log_headers:
            shown = as_json(redact_headers(headers))
            logger.log(level, "{} {!r} with headers {}", scope["method"], scope["path"], shown)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:  # too late for another response: the connection is closed instead
                raise
            await error_response(to_server_error(error), core_error)(scope, receive, send_with_id)
        finally:
            logger.log(
                level, "{} {!r}: {} in {:.3f} s", scope["method"], scope["path"], status, perf_counter() - started
            )
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


class CorsMiddleware(CORSMiddleware):
    """Starlette's, set up from `network.cors_origins`, with a line in the log for whoever wonders why it refuses."""

    def __init__(self, app: ASGIApp, origins: list[str]) -> None:
        everybody = "*" in origins
        super().__init__(
            app,
            allow_origins=[origin for origin in origins if origin != "loopback"],
            allow_origin_regex=LOOPBACK_ORIGINS if "loopback" in origins else None,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=not everybody,
            expose_headers=[HEADER],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            logger.warning(
                "A web page at {} was refused by CORS. Add that origin to network.cors_origins to let it in.",
                request_headers.get("origin"),
            )
        return response
