"""`/metrics`, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from loguru import logger
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from backends.client import EngineClient
from backends.manager import ModelManager
from common.engine_metrics import EngineMetrics, LoadedModel
from common.errors import ServerError
from endpoints.routing import API, OPEN, CoreRoute
from endpoints.state import ServerState, loaded_info

# Seconds that a scrape waits for the engine, which answers between two of its steps. A chunk of prefill takes longer on
# many machines; then the scrape shows what the engine has told before.
PATIENCE: Final = 0.5
# Prometheus says in the header Accept which of these it wants.
_DOCUMENTED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}
}


def metrics_router(state: ServerState) -> APIRouter:
    """The route of an application; `network.public_metrics` says who may use it."""
    router = APIRouter(route_class=CoreRoute)
    metrics, watch = state.metrics, EngineWatch(state.manager, state.metrics.engine)
    level = OPEN if state.settings.network.public_metrics else API

    @router.get("/metrics", openapi_extra=level, response_class=Response, responses=_DOCUMENTED)
    async def show_metrics(request: Request) -> Response:
        """All metrics, in Prometheus' text format or as OpenMetrics."""
        await watch.look()
        encode, content_type = _encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    return router


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # a version with a part that is no number
        return choose_encoder("")


class EngineWatch:
    """Asks the engine of whichever model is loaded what it holds, one question at a time."""

    def __init__(self, manager: ModelManager, metrics: EngineMetrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._asked: EngineClient | None = None
        self._question: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Bring the metrics up to date, as far as the engine answers in time. Does not raise."""
        client = self._manager.current
        if client is None or client.state != "ready":
            self._metrics.forget()
            return
        info = loaded_info(client)  # another one for each process
        self._metrics.set_model(LoadedModel(info, info.name, info.architecture, info.device))
        if self._question is None or self._question.done() or self._asked is not client:
            self._asked = client
            self._question = asyncio.create_task(self._ask(client, info))
        await asyncio.wait({self._question}, timeout=PATIENCE)

    async def _ask(self, client: EngineClient, process: object) -> None:
        try:
            self._metrics.set_state(process, await client.inspect())
        except ServerError as error:
            logger.debug("The engine of {} does not tell what it holds: {}", client.name, error.message)
