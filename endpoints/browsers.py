"""What web pages may do: CORS, and what guards a server without keys from pages of other sites."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from typing import Final

from loguru import logger
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import parse_address
from common.errors import HostNotAllowed, OriginNotAllowed

LOOPBACK_ORIGINS: Final = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
OWN_NAMES: Final = frozenset({"localhost", "host.docker.internal"})
# Nobody can have these registered, so no page from elsewhere has such a name.
OWN_SUFFIXES: Final = (".localhost", ".local")
MAX_SHOWN: Final = 100  # characters of a header, in messages
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+?)\.?(:\d{0,5})?", re.ASCII)


class CorsMiddleware(CORSMiddleware):
    """Starlette's, set up from `network.cors_origins`, with a line in the log for whoever wonders why it refuses."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], expose_headers: Sequence[str] = ()) -> None:
        everybody = "*" in origins
        super().__init__(
            app,
            allow_origins=[origin for origin in origins if origin != "loopback"],
            allow_origin_regex=LOOPBACK_ORIGINS.pattern if "loopback" in origins else None,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=not everybody,
            # Chromium asks for it where a page of the internet uses a server of a home network.
            allow_private_network=True,
            expose_headers=expose_headers,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            logger.warning(
                "A web page at {!r} was refused by CORS. Add that origin to network.cors_origins to let it in.",
                request_headers["origin"][:MAX_SHOWN],
            )
        return response


class BrowserGuardMiddleware:
    """For a server without keys: refuses what browsers send on behalf of pages that may not use it.

    With keys it is not needed, since a page of another site has none to send. Without them

    * a page may send plain requests, of which CORS only hides the answers: the origin has to be one that CORS allows;
    * a page may have its own name resolve to this machine (DNS rebinding): the name that the browser asked for has to
      be known as this server's.

    Programs that are no browsers send neither Origin nor Sec-Fetch-Site, and pass.

    Args:
        hosts: `network.allowed_hosts`.
        origins: `network.cors_origins`.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts) | OWN_NAMES
        self._origins = frozenset(origins) - {"loopback"}
        self._loopback = "loopback" in origins
        self._machine: frozenset[str] | None = None  # its own names, looked up when they are first needed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if "origin" in headers or "sec-fetch-site" in headers:
                await self._check_host(headers)
                self._check_origin(headers)
        await self._app(scope, receive, send)

    async def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        host = host_of(given[0]) if len(given) == 1 else None
        if host is not None:
            if host in self._hosts or host.endswith(OWN_SUFFIXES) or parse_address(host) is not None:
                return
            if self._machine is None:
                self._machine = await asyncio.to_thread(_machine_names)
            if host in self._machine:
                return
        shown = ", ".join(given)[:MAX_SHOWN]
        logger.warning("A browser that addressed the server as {!r} was refused: see network.allowed_hosts.", shown)
        raise HostNotAllowed(
            f"Without keys, browsers may not address this server as {shown!r}. If that is a name of its own, add it to "
            "network.allowed_hosts."
        )

    def _check_origin(self, headers: Headers) -> None:
        if self._is_allowed(headers):
            return
        page = headers.get("origin", "another site")[:MAX_SHOWN]
        logger.warning("A web page at {!r} was refused: see network.cors_origins.", page)
        raise OriginNotAllowed(
            f"Without keys, web pages of {page!r} may not use this server. To let them, add their origin to "
            "network.cors_origins."
        )

    def _is_allowed(self, headers: Headers) -> bool:
        site = headers.get("sec-fetch-site")
        if site in ("same-origin", "none"):  # none: typed into the address bar, or a bookmark
            return True
        origins = headers.getlist("origin")
        if not origins:  # of an image or a link; the same site is this machine, on another port
            return site == "same-site"
        return "*" in self._origins or all(self._is_allowed_origin(origin, headers["host"]) for origin in origins)

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        if origin in self._origins or (self._loopback and LOOPBACK_ORIGINS.fullmatch(origin)):
            return True
        scheme, separator, address = origin.lower().partition("://")
        if scheme in ("http", "https"):
            return address == host.lower()
        # Extensions and desktop applications have schemes of their own, which no web page can have.
        return scheme != "" and separator != ""


def host_of(header: str) -> str | None:
    """The host in a Host header, in lower case without port, brackets and a dot at its end; None if it is garbled."""
    match = _HOST.fullmatch(header.strip().lower())
    return match[1].strip("[]") if match else None


def _machine_names() -> frozenset[str]:
    name = socket.gethostname()
    return frozenset(text.lower().rstrip(".") for text in (name, socket.getfqdn(name)) if text)
