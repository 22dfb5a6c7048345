"""What wraps every request: its id, and the answer to browsers that ask whether a page may send it."""

from __future__ import annotations

import re
from typing import Final
from uuid import uuid4

from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.logger import request_id

HEADER: Final = "X-Request-Id"
_ACCEPTABLE_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LOOPBACK_ORIGINS: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class RequestIdMiddleware:
    """Gives every request an id, the client's own where it is fit for a log, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        identity = given if _ACCEPTABLE_ID.fullmatch(given) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = identity
            await send(message)

        token = request_id.set(identity)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            request_id.reset(token)


class CorsMiddleware(CORSMiddleware):
    """Starlette's, set up from `network.cors_origins`, and with a line in the log for whoever wonders why it refuses."""

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
