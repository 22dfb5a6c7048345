"""The application: routers, middleware and errors put together, and served by uvicorn."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from loguru import logger
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from backends.manager import ModelManager
from common.auth import KeyStore
from common.certificate import ServerCertificate
from common.config_models import Settings
from common.errors import RequestCancelled, ServerError, SettingsError
from common.open_files import allow_many_open_files
from common.sampling import SamplerPresets
from common.version import VERSION
from endpoints.Anthropic.router import v1 as anthropic_v1
from endpoints.browsers import BrowserGuardMiddleware, CorsMiddleware
from endpoints.core.cache import v1 as cache_v1
from endpoints.core.download import v1 as download_v1
from endpoints.core.drafts import v1 as drafts_v1
from endpoints.core.embeddings import v1 as embedding_models_v1
from endpoints.core.lora import v1 as lora_v1
from endpoints.core.models import v1 as models_v1
from endpoints.core.router import router as core_router
from endpoints.core.router import v1 as core_v1
from endpoints.core.tokens import router as token_router
from endpoints.core.tokens import v1 as token_v1
from endpoints.documentation import documentation_router
from endpoints.errors import ERROR_RESPONSES, ERROR_SCHEMA, core_error, error_response, to_server_error
from endpoints.Kobold.router import generating as kobold_generating
from endpoints.Kobold.router import router as kobold_router
from endpoints.LlamaCpp.router import router as llama_cpp_router
from endpoints.metrics import metrics_router
from endpoints.middleware import HEADER, BodyLimitMiddleware, BodyTimeoutMiddleware, RequestContextMiddleware
from endpoints.OAI.embeddings import v1 as embeddings_v1
from endpoints.OAI.router import v1 as openai_v1
from endpoints.Ollama.router import embedding as ollama_embedding
from endpoints.Ollama.router import generating as ollama_generating
from endpoints.Ollama.router import router as ollama_router
from endpoints.protocol import MAX_HEADER_BYTES, HttpProtocol
from endpoints.Responses.router import v1 as responses_v1
from endpoints.routing import SECURITY_SCHEMES, VERSION_PREFIX, RouteAccess, methods_of, route_table
from endpoints.state import ServerState, application_state, attach_state, state_of

# Longer than clients keep idle connections (httpx, and so the openai client: 5 s). A server that closes first may do so
# just as the next request is under way.
KEEP_ALIVE_SECONDS = 75
# How long requests have to tell why they end when the server does; then their connections are cut.
LAST_WORDS_SECONDS = 3
POLL_SECONDS = 0.05

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
        await state.downloads.close()
        await state.responses.close()
        await state.embeddings.close()
        await manager.close()
        state.prompts.close()

    app = FastAPI(
        title="Waypoint",
        version=VERSION,
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
        openapi_url=None,  # see endpoints.documentation
        middleware=_middleware(settings, with_keys=keys is not None),
        exception_handlers={HTTPException: _render_unrouted},
    )
    presets = presets or SamplerPresets()
    _select_preset(settings, presets)
    state = ServerState(settings, manager, keys, presets)
    manager.on_loaded = state.prepare
    manager.on_load_ended = state.metrics.count_load
    manager.on_unload = state.metrics.count_unload
    manager.on_restart = state.metrics.count_restart
    state.metrics.models_loaded.set_function(lambda: manager.loaded)
    attach_state(app.state, state)
    with_openai = "oai" in settings.network.api_servers
    documentation = documentation_router(settings.network.public_docs)
    unversioned = [core_router, documentation, metrics_router(state), token_router]
    versioned = [core_v1, models_v1, embedding_models_v1, token_v1, cache_v1, lora_v1, drafts_v1, download_v1]
    if with_openai:
        # First, as routes are tried in turn, and these are asked for most.
        versioned = [openai_v1, responses_v1, embeddings_v1, *versioned]
        unversioned.append(llama_cpp_router)
    if "kobold" in settings.network.api_servers:
        unversioned += [kobold_generating, kobold_router]
    if "ollama" in settings.network.api_servers:
        unversioned += [ollama_generating, ollama_embedding, ollama_router]
    if with_openai or "anthropic" in settings.network.api_servers:
        versioned.append(anthropic_v1)
    for router in versioned:
        app.include_router(router, prefix=VERSION_PREFIX)
    for router in unversioned:
        app.include_router(router)
    for router in versioned:  # clients of other servers leave the prefix out
        app.include_router(router, include_in_schema=False)
    _describe_security_and_errors(app)
    return app


def _middleware(settings: Settings, *, with_keys: bool) -> list[Middleware]:
    """From the outermost to the innermost."""
    network = settings.network
    limit = network.max_body_mb
    guard = Middleware(BrowserGuardMiddleware, hosts=network.allowed_hosts, origins=network.cors_origins)
    return [
        Middleware(CorsMiddleware, origins=network.cors_origins, expose_headers=[HEADER]),
        Middleware(RequestContextMiddleware, log_headers=settings.logging.log_requests),
        *([] if with_keys else [guard]),
        *([Middleware(BodyLimitMiddleware, limit=limit)] if limit else []),
        *([Middleware(BodyTimeoutMiddleware, limit=network.body_timeout)] if network.body_timeout else []),
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


def _describe_security_and_errors(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        components = document.setdefault("components", {})
        components["securitySchemes"] = SECURITY_SCHEMES
        components.setdefault("schemas", {})["Error"] = ERROR_SCHEMA
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


# --- serving ------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn, bound to its port from the start.

    Attributes:
        port: where it listens, also when `network.port` is 0.
        certificate: of a server that speaks https.

    Raises:
        SettingsError: from the constructor, the address cannot be bound or the certificate cannot be used.
    """

    def __init__(self, app: FastAPI, settings: Settings, manager: ModelManager) -> None:
        certificate = ServerCertificate.of(settings.network)
        super().__init__(
            uvicorn.Config(
                app,
                # Not whichever parser is installed: httptools limits no headers.
                http=partial(HttpProtocol, settings.network),  # type: ignore[arg-type]  # which uvicorn only calls
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                ssl_context_factory=(lambda config, default: certificate.context) if certificate is not None else None,
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2 * LAST_WORDS_SECONDS,
            )
        )
        # Streams end as `_end_in_order()` has them end.
        AppStatus.enable_automatic_graceful_drain = False
        self.certificate = certificate
        self._manager = manager
        self._state = application_state(app)
        self._patience = settings.network.shutdown_timeout
        self._listener = _bind(settings.network.host, settings.network.port)
        self.port: int = self._listener.getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self._listener])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server in order, a second one at once."""
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGINT:
            self._captured_signals.append(sig)  # which uvicorn raises again in the end, as a shell wants to know of it
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        in_order = asyncio.create_task(self._end_in_order(sockets))
        while not in_order.done() and not self.force_exit:
            await asyncio.wait({in_order}, timeout=POLL_SECONDS)
        if in_order.done():
            in_order.result()
        else:
            in_order.cancel()
            await self._end_at_once()

    async def _end_in_order(self, sockets: list[socket.socket] | None) -> None:
        self._state.stopping = True
        for server in self.servers:
            server.close()
        await asyncio.gather(
            self._manager.stop_loading(),
            self._state.embeddings.stop_loading(),
            self._state.downloads.close(),
            self._requests_done(),
        )
        self._state.queue.end_all(RequestCancelled("The server is shutting down; the request ends early."))
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._cut_connections)
        await asyncio.gather(self._manager.close(), self._state.embeddings.close(), super().shutdown(sockets))

    async def _requests_done(self) -> None:
        """Wait until the requests in flight are answered, or have had the time for it."""
        if in_flight := set(self.server_state.tasks):
            logger.info("Requests in flight may take {} s more; a second signal cuts them off", self._patience)
            await asyncio.wait(in_flight, timeout=self._patience)

    async def _end_at_once(self) -> None:
        logger.warning("Shutting down at once")
        await asyncio.gather(self._manager.close(force=True), self._state.embeddings.close(force=True))
        self._cut_connections()
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=LAST_WORDS_SECONDS)
        await self.lifespan.shutdown()

    def _cut_connections(self) -> None:
        for connection in self.server_state.connections:
            connection.transport.abort()


async def serve(app: FastAPI, settings: Settings, manager: ModelManager) -> None:
    """Serve until SIGINT or SIGTERM; then end the models and what they work on.

    Args:
        app: from `create_app()`.
        settings: `network` says where.
        manager: the one that `app` was made with.

    Raises:
        SettingsError: the address cannot be bound, or the certificate cannot be used.
    """
    allow_many_open_files()
    # What is there by now stays. A collection that went through it would hold every stream for a tenth of a second.
    gc.collect()
    gc.freeze()
    server = Server(app, settings, manager)
    host, scheme = settings.network.host, "http" if server.certificate is None else "https"
    logger.info("Listening on {}://{}:{}", scheme, f"[{host}]" if ":" in host else host, server.port)
    watching = None if server.certificate is None else asyncio.create_task(server.certificate.watch())
    try:
        await server.serve()
    finally:
        if watching is not None:
            watching.cancel()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Set network.host and network.port to an "
            "address of this machine and a free port."
        ) from error
