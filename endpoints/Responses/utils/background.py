"""Responses that are generated while nobody waits for them.

One is an ordinary request whose client is the server itself: it waits in the queue, has its model loaded, and is logged
and counted like any other. What it leads to is stored, where its real client asks for it.
"""

from __future__ import annotations

import asyncio
import json
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from fastapi import Request

from common.errors import ErrorRecord, InvalidRequest, ServerError, Unsupported
from endpoints.errors import to_server_error
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.types.response import ResponseObject
from endpoints.Responses.utils.begin import new_response
from endpoints.Responses.utils.codec import failed
from endpoints.Responses.utils.prepared import PreparedRequest
from endpoints.Responses.utils.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    import httpx

_HOP_BY_HOP: Final = frozenset({"connection", "content-length", "expect", "transfer-encoding"})


@dataclass(frozen=True)
class BackgroundRun:
    """
    Attributes:
        asked: the request.
        stored: its response.
    """

    asked: PreparedRequest
    stored: StoredResponse

    def begun(self, response: ResponseObject) -> ResponseObject:
        """A response as it begins, under the id that the client knows."""
        queued = self.stored.response
        return response.model_copy(update={"id": queued.id, "created_at": queued.created_at})


# Set in the task of one.
_CURRENT: Final[ContextVar[BackgroundRun | None]] = ContextVar("background_run", default=None)


def current_run() -> BackgroundRun | None:
    """What the request of this task is to generate in the background."""
    return _CURRENT.get()


def check_background(body: ResponsesRequest, store: ResponseStore) -> None:
    """Raise `InvalidRequest` for a request that cannot be served in the background."""
    if body.stream:
        raise Unsupported(
            "background responses are not streamed here: leave stream out, and ask for the response by its id.",
            param="stream",
        )
    if not body.store:
        raise InvalidRequest(
            "background can only be used when `store` is true: its response is asked for later.", param="background"
        )
    if not store.is_on:
        raise Unsupported("background responses are stored, and network.response_store_mb is 0.", param="background")


async def begin_run(request: Request, store: ResponseStore, asked: PreparedRequest, owner: str) -> ResponseObject:
    """Have a request served once more, in the background.

    Returns:
        The response as it is until then.

    Raises:
        Unsupported: it is larger, with all that it goes on from, than all responses together may be.
    """
    import httpx  # here, as in `common.fetch`

    body, chat = asked.body, asked.chat
    queued = new_response(body, chat.body, chat.tools, model=body.model or "", status="queued", store=True)
    stored = store.put(owner, queued, asked.items, asked.previous)
    if stored is None:
        raise Unsupported(
            "The request, with all that it goes on from, is larger than network.response_store_mb allows.",
            param="background",
        )
    headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP]
    message = httpx.Request("POST", str(request.url), headers=headers, content=await request.body())
    transport = httpx.ASGITransport(request.app, raise_app_exceptions=False)
    stored.task = asyncio.create_task(_run(transport, message, store, BackgroundRun(asked, stored)))
    stored.task.add_done_callback(partial(_ended, store, stored))
    return queued


async def _run(
    transport: httpx.ASGITransport, message: httpx.Request, store: ResponseStore, run: BackgroundRun
) -> None:
    _CURRENT.set(run)
    answer = await transport.handle_async_request(message)
    if answer.status_code >= HTTPStatus.BAD_REQUEST:
        told = json.loads(await answer.aread())["error"]
        error = ServerError.from_record(ErrorRecord(code=told["code"], message=told["message"]))
        store.update(run.stored, failed(run.stored.response, error))


def _ended(store: ResponseStore, stored: StoredResponse, task: asyncio.Task[None]) -> None:
    stored.task = None
    if task.cancelled():
        store.update(stored, stored.response.model_copy(update={"status": "cancelled"}))
    elif isinstance(error := task.exception(), Exception):
        store.update(stored, failed(stored.response, to_server_error(error)))
