"""A request with what it refers to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from endpoints.Responses.types.items import InputItem, ReferenceItem
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.utils.requests import ChatRequest
from endpoints.Responses.utils.store import ResponseStore, StoredResponse


class PreparedRequest:
    """
    Attributes:
        body: of it.
        previous: the stored response that it goes on from.
        items: of its input, without references.
        chat: the chat completion that answers it.
        is_stored: whether its response is kept.

    Args:
        referred: the items that it refers to, by id.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        previous: StoredResponse | None,
        referred: Mapping[str, InputItem],
        *,
        is_stored: bool,
    ) -> None:
        self.body = body
        self.previous = previous
        self.items = [referred[item.id] if isinstance(item, ReferenceItem) else item for item in body.input]
        history = previous.conversation() if previous is not None else []
        self.chat = ChatRequest(body, history, self.items)
        self.is_stored = is_stored


async def prepared(body: ResponsesRequest, store: ResponseStore, owner: str) -> PreparedRequest:
    """
    Args:
        owner: whose the request is.

    Raises:
        InvalidRequest: it cannot be served as it is.
        NotFound: an item that it refers to is not stored.
    """
    previous = None
    if body.previous_response_id is not None:
        previous = store.previous(body.previous_response_id, owner)
    referred = store.items(owner, [item.id for item in body.input if isinstance(item, ReferenceItem)])

    def prepare() -> PreparedRequest:
        return PreparedRequest(body, previous, referred, is_stored=body.store and store.is_on)

    return await asyncio.to_thread(prepare)  # long conversations take seconds
