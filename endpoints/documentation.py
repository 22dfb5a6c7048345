"""`/docs` and `/openapi.json`: the API's description, for people and for programs."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import JSONResponse

from common.errors import AuthenticationFailed, ServerError
from endpoints.errors import ErrorBody, core_error
from endpoints.routing import API, OPEN, CoreRoute

_HINT = "To let everybody read the documentation, as browsers send no keys, set network.public_docs."


class _DocumentationRoute(CoreRoute):
    @staticmethod
    def render_error(error: ServerError) -> ErrorBody:
        if isinstance(error, AuthenticationFailed):
            error = AuthenticationFailed(f"{error.message} {_HINT}")
        return core_error(error)


def documentation_router(public: bool) -> APIRouter:
    """FastAPI's own routes for these pages know no keys.

    Args:
        public: `network.public_docs`.
    """
    router = APIRouter(route_class=_DocumentationRoute)
    options: dict[str, Any] = {
        "openapi_extra": OPEN if public else API,
        "include_in_schema": False,
        "methods": ["GET", "HEAD"],
    }

    @router.api_route("/openapi.json", **options)
    async def describe(request: Request) -> Response:
        app: FastAPI = request.app
        # FastAPI makes it for the first who asks, which takes a while.
        return JSONResponse(await asyncio.to_thread(app.openapi))

    @router.api_route("/docs", **options)
    async def show(request: Request) -> Response:
        # Relative, so that it is found behind a proxy that serves the server below some path.
        page = get_swagger_ui_html(openapi_url="openapi.json", title=request.app.title)
        # Its buttons send requests: no page may show it in a frame and have its own visitors press them.
        page.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return page

    return router
