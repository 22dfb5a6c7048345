"""A request with what it refers to."""

from __future__ import annotations

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
        owner: whose it is.

    Raises:
        InvalidRequest: it cannot be served as it is.
        NotFound: an item that it refers to is not stored.
    """

    def __init__(self, body: ResponsesRequest, store: ResponseStore, owner: str) -> None:
        self.body = body
        self.previous: StoredResponse | None = None
        if body.previous_response_id is not None:
            self.previous = store.previous(body.previous_response_id, owner)
        self.items: list[InputItem] = [
            store.item(item.id, owner) if isinstance(item, ReferenceItem) else item for item in body.input
        ]
        history = self.previous.conversation() if self.previous is not None else []
        self.chat = ChatRequest(body, history, self.items)
        self.is_stored = body.store and store.is_on
