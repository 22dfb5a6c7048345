"""The application: routers, middleware and errors put together, and served by uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from backends.manager import ModelManager
from common.auth import KeyStore
from common.config_models import Settings
from common.errors import SettingsError
from common.sampling import SamplerPresets
from endpoints.core.router import router as core_router
from endpoints.errors import core_error, error_response, to_server_error
from endpoints.middleware import CorsMiddleware, RequestIdMiddleware
from endpoints.OAI.router import router as openai_router
from endpoints.routing import SECURITY_SCHEMES, RouteAccess, route_table
from endpoints.state import ServerState, attach_state
from endpoints.streaming import SHUTDOWN_GRACE_SECONDS

__all__ = ["RouteAccess", "create_app", "route_table", "serve"]


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
        lifespan=lifespan,
        redoc_url=None,
        middleware=[
            Middleware(CorsMiddleware, origins=settings.network.cors_origins),
            Middleware(RequestIdMiddleware),
        ],
        exception_handlers={HTTPException: _render_unrouted},
    )
    attach_state(app.state, ServerState(settings, manager, keys, _select_preset(settings, presets or SamplerPresets())))
    app.include_router(core_router)
    app.include_router(openai_router)
    _describe_security(app)
    return app


def _select_preset(settings: Settings, presets: SamplerPresets) -> SamplerPresets:
    name = settings.sampling.override_preset
    if name:
        try:
            presets.select(name)
        except Exception as error:
            raise SettingsError(f"sampling.override_preset: {error}") from error
    return presets


async def _render_unrouted(request: Request, error: Exception) -> Response:
    """Unknown paths and methods belong to no API, so they get every member that some API's clients read."""
    return error_response(to_server_error(error), core_error)


def _describe_security(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {})["securitySchemes"] = SECURITY_SCHEMES
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


# --- serving ------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, manager: ModelManager) -> None:
        super().__init__(config)
        self._manager = manager

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests in flight are told why they end before their connections are closed.
        await asyncio.gather(self._manager.close(), super().shutdown(sockets))


async def serve(
    app: FastAPI,
    settings: Settings,
    manager: ModelManager,
    *,
    on_listening: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: from `create_app()`.
        settings: `network` says where.
        manager: the one that `app` was made with.
        on_listening: called with host and port once the port is bound.

    Raises:
        SettingsError: the address cannot be bound.
    """
    network = settings.network
    listener = _bind(network.host, network.port)
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=int(SHUTDOWN_GRACE_SECONDS) + 1
    )
    logger.info("Listening on http://{}:{}", network.host, port)
    if on_listening is not None:
        on_listening(network.host, port)
    await _Server(config, manager).serve(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Set network.host and network.port to an address "
            "of this machine and a free port."
        ) from error
