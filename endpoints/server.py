"""The application: routers, middleware and errors put together, and served by uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from backends.manager import ModelManager
from common.auth import KeyStore
from common.config_models import Settings
from common.errors import ServerError, SettingsError
from common.sampling import SamplerPresets
from common.version import VERSION
from endpoints.core.cache import v1 as cache_v1
from endpoints.core.router import router as core_router
from endpoints.core.router import v1 as core_v1
from endpoints.core.tokens import router as token_router
from endpoints.core.tokens import v1 as token_v1
from endpoints.errors import core_error, error_response, to_server_error
from endpoints.LlamaCpp.router import router as llama_cpp_router
from endpoints.metrics import metrics_router
from endpoints.middleware import BodyLimitMiddleware, CorsMiddleware, RequestContextMiddleware
from endpoints.OAI.router import v1 as openai_v1
from endpoints.routing import SECURITY_SCHEMES, VERSION_PREFIX, RouteAccess, methods_of, route_table
from endpoints.state import ServerState, attach_state, state_of
from endpoints.streaming import SHUTDOWN_GRACE_SECONDS

# Longer than clients keep idle connections (httpx, and so the openai client: 5 s). A server that closes first may do so
# just as the next request is under way.
KEEP_ALIVE_SECONDS = 75

__all__ = ["RouteAccess", "Server", "create_app", "route_table", "serve"]


def create_app(
    settings: Settings, manager: ModelManager, keys: KeyStore | None, presets: SamplerPresets | None = None
) -> FastAPI:
    """The ASGI application over a manager, which it closes when it shuts down.

    Args:
        settings: what the server runs with.
        manager: holds the models, or none yet.
        keys: None serves everybody as administrator.
        presets: where sampler presets come from; None for those in `sampler_overrides/`.

    Raises:
        SettingsError: `sampling.override_preset` cannot be used.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await manager.close()

    app = FastAPI(
        title="Waypoint",
        version=VERSION,
        lifespan=lifespan,
        redoc_url=None,
        middleware=_middleware(settings),
        exception_handlers={HTTPException: _render_unrouted},
    )
    presets = presets or SamplerPresets()
    _select_preset(settings, presets)
    state = ServerState(settings, manager, keys, presets)
    manager.on_loaded = state.prepare
    manager.on_load_ended = state.metrics.count_load
    manager.on_restart = state.metrics.count_restart
    attach_state(app.state, state)
    with_openai = "oai" in settings.network.api_servers
    for router in (core_router, metrics_router(state), token_router, *([llama_cpp_router] if with_openai else [])):
        app.include_router(router)
    versioned = [core_v1, token_v1, cache_v1, *([openai_v1] if with_openai else [])]
    for router in versioned:
        app.include_router(router, prefix=VERSION_PREFIX)
    for router in versioned:  # clients of other servers leave the prefix out
        app.include_router(router, include_in_schema=False)
    _describe_security(app)
    return app


def _middleware(settings: Settings) -> list[Middleware]:
    """From the outermost to the innermost."""
    limit = settings.network.max_body_mb
    return [
        Middleware(CorsMiddleware, origins=settings.network.cors_origins),
        Middleware(RequestContextMiddleware, log_headers=settings.logging.log_requests),
        *([Middleware(BodyLimitMiddleware, limit=limit)] if limit else []),
    ]


def _select_preset(settings: Settings, presets: SamplerPresets) -> None:
    name = settings.sampling.override_preset
    if name:
        try:
            presets.select(name)
        except ServerError as error:
            raise SettingsError(f"sampling.override_preset: {error.message}") from error


async def _render_unrouted(request: Request, error: Exception) -> Response:
    """Unknown paths and methods belong to no API, so they get every member that some API's clients read."""
    failure = to_server_error(error)
    state_of(request).metrics.http_errors.labels("", failure.code).inc()
    response = error_response(failure, core_error)
    if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(methods_of(request.app, request.url.path))
    return response


def _describe_security(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {})["securitySchemes"] = SECURITY_SCHEMES
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


# --- serving ------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn, bound to its port from the start.

    Attributes:
        port: where it listens, also when `network.port` is 0.

    Raises:
        SettingsError: from the constructor, the address cannot be bound.
    """

    def __init__(self, app: FastAPI, settings: Settings, manager: ModelManager) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(SHUTDOWN_GRACE_SECONDS) + 1,
            )
        )
        self._manager = manager
        self._listener = _bind(settings.network.host, settings.network.port)
        self.port: int = self._listener.getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests in flight are told why they end before their connections are closed.
        await asyncio.gather(self._manager.close(), super().shutdown(sockets))


async def serve(app: FastAPI, settings: Settings, manager: ModelManager) -> None:
    """Serve until SIGINT or SIGTERM; then end the models and what they work on.

    Args:
        app: from `create_app()`.
        settings: `network` says where.
        manager: the one that `app` was made with.

    Raises:
        SettingsError: the address cannot be bound.
    """
    server = Server(app, settings, manager)
    host = settings.network.host
    logger.info("Listening on http://{}:{}", f"[{host}]" if ":" in host else host, server.port)
    await server.serve()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Set network.host and network.port to an "
            "address of this machine and a free port."
        ) from error
