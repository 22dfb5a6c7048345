"""What the store of responses keeps, and how much."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import NotFound, PreviousResponseNotFound
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.Responses.types.items import InputItem, MessageItem
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.types.response import OutputMessage, OutputText, ResponseObject
from endpoints.Responses.utils.begin import new_response
from endpoints.Responses.utils.output import item_id
from endpoints.Responses.utils.store import MEGABYTE, ResponseStore, StoredResponse
from endpoints.Responses.utils.tools import ToolTable

OWNER = "somebody"


def response(text: str = "answer") -> ResponseObject:
    request = ResponsesRequest.model_validate({})
    chat = ChatCompletionRequest.model_validate({"messages": [{"content": "x"}]})
    made = new_response(request, chat, ToolTable([]), model="m", store=True)
    message = OutputMessage(id=item_id("msg", made.id, 0), status="completed", content=[OutputText(text=text)])
    return made.model_copy(update={"output": [message]})


def said(text: str) -> list[InputItem]:
    return [MessageItem.model_validate({"content": text})]


def put(store: ResponseStore, previous: StoredResponse | None = None, size: int = 0) -> StoredResponse:
    stored = store.put(OWNER, response(), said("x" * size), previous)
    assert stored is not None
    return stored


def texts(items: list[InputItem]) -> list[str | None]:
    return [item.content[0].text for item in items if isinstance(item, MessageItem)]


def test_a_turn_is_kept_once() -> None:
    store = ResponseStore(1)
    first = put(store, size=100_000)
    sizes = [first.size]
    turn = first
    for _ in range(20):
        turn = put(store, turn)
        sizes.append(turn.size)
    assert store.bytes == sum(sizes)
    assert store.bytes < 2 * first.size
    assert texts(turn.conversation())[:3] == ["x" * 100_000, "answer", ""]
    assert len(turn.conversation()) == 42


def test_a_dropped_beginning_is_kept_for_those_that_need_it() -> None:
    store = ResponseStore(1)
    first = put(store)
    second, other = put(store, first), put(store, first)
    everything = store.bytes
    asyncio.run(store.delete(first))
    assert store.bytes == everything
    with pytest.raises(NotFound):
        store.get(first.id, OWNER)
    assert len(second.conversation()) == 4
    asyncio.run(store.delete(second))
    assert store.bytes == everything - second.size
    asyncio.run(store.delete(other))
    assert store.bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(1)
    first, second = put(store, size=400_000), put(store, size=400_000)
    store.get(first.id, OWNER)
    third = put(store, size=400_000)
    assert store.bytes <= MEGABYTE
    for kept in (first, third):
        assert store.get(kept.id, OWNER) is kept
    with pytest.raises(PreviousResponseNotFound, match=r"network\.response_store_mb"):
        store.previous(second.id, OWNER)


def test_what_was_dropped_while_a_request_went_on_from_it() -> None:
    store = ResponseStore(1)
    first = put(store, size=1000)
    asyncio.run(store.delete(first))
    assert store.bytes == 0
    second = put(store, first)
    assert store.bytes == first.size + second.size
    asyncio.run(store.delete(second))
    assert store.bytes == 0


def test_a_response_that_is_too_large_drops_no_other() -> None:
    store = ResponseStore(1)
    small = put(store)
    assert store.put(OWNER, response("x" * MEGABYTE), [], None) is None
    large = put(store, size=600_000)
    assert store.put(OWNER, response("x" * 600_000), [], large) is None  # with what it goes on from
    assert store.get(small.id, OWNER) is small
    assert store.bytes == small.size + large.size


def test_a_response_that_grows() -> None:
    store = ResponseStore(1)
    other = put(store, size=500_000)
    grown = put(store)
    store.update(grown, response("x" * 900_000))
    assert store.bytes == grown.size
    with pytest.raises(NotFound):
        store.get(other.id, OWNER)
    asyncio.run(store.delete(grown))
    store.update(grown, response())
    assert store.bytes == 0
