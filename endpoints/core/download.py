"""Routes that download models from the Hugging Face Hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from common.download_messages import RepoType
from common.downloader import Download
from common.errors import RequestCancelled
from endpoints.core.types.download import DownloadAnswer, DownloadBody, DownloadCard, DownloadEvent, DownloadList
from endpoints.routing import ADMIN, CoreWatchedRoute
from endpoints.state import State
from endpoints.streaming import ACCEPT_SECONDS, EventStream
from endpoints.wire import CORE

v1 = APIRouter(route_class=CoreWatchedRoute)  # below /v1

EVENT_STREAM: Final = "text/event-stream"
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {EVENT_STREAM: {}}},
    202: {"model": DownloadCard, "description": "The download goes on by itself, as detach asks for."},
}


@v1.post("/download", openapi_extra=ADMIN, response_model=DownloadAnswer, responses=_RESPONSES)
async def start_download(body: DownloadBody, request: Request, state: State) -> Response | DownloadAnswer:
    """Download a repository of the hub to a new folder, which is there once all files have come and been verified.

    Goes on where an earlier attempt has ended. Ends when the client goes, unless detach is set; what has come is kept.
    """
    download = await state.downloads.start(body.request())
    if body.detach:
        card = DownloadCard.of(download)
        return Response(card.model_dump_json(), HTTPStatus.ACCEPTED, media_type="application/json")
    end = partial(download.stop, RequestCancelled("The client that asked for the download has gone."))
    try:
        if not body.stream and EVENT_STREAM not in request.headers.get("accept", ""):
            return DownloadAnswer(download_path=str(await download.result()))
        with suppress(TimeoutError):
            async with asyncio.timeout(ACCEPT_SECONDS), aclosing(_events(download)) as events:
                await anext(events)
    except BaseException:
        await end()
        raise
    ping = state.settings.network.sse_ping_interval
    return EventStream(_events(download), wire=CORE, ping=ping, cleanup=end)


async def _events(download: Download) -> AsyncGenerator[str]:
    """How it gets on, from when the files are listed, and the answer."""
    async for progress in download.follow():
        if progress.phase != "starting":
            yield DownloadEvent.of(progress).model_dump_json()
    yield DownloadAnswer(download_path=str(await download.result())).model_dump_json()


@v1.get("/downloads", openapi_extra=ADMIN)
async def list_downloads(state: State) -> DownloadList:
    """The downloads that run, and those that have ended since the server was started."""
    return DownloadList(data=[DownloadCard.of(download) for download in state.downloads])


@v1.delete("/downloads/{repo_type}/{folder_name}", openapi_extra=ADMIN)
async def cancel_download(repo_type: RepoType, folder_name: str, state: State) -> None:
    """End a download and delete what has come of it, also where it has ended early before. A complete folder stays."""
    await state.downloads.cancel(repo_type, folder_name)
