"""Responses that clients want kept, in memory, to go on from them or to ask for them again.

A response is kept with what its request added to the conversation; what came before is that of the response it went on
from. Such an earlier part stays as long as a later one needs it, also when it can no longer be asked for by itself.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter

from common.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from endpoints.Responses.types.items import CallOutputItem, InputItem, MessageItem
from endpoints.Responses.types.response import ResponseObject
from endpoints.Responses.utils.output import item_id

MEGABYTE: Final = 1024 * 1024
MAX_RESPONSES: Final = 10_000
OVERHEAD: Final = 1_000  # bytes of a response beside its texts

_ITEM: Final[TypeAdapter[InputItem]] = TypeAdapter(InputItem)


@dataclass(eq=False)
class StoredResponse:
    """
    Attributes:
        owner: whose it is; see `common.auth.Caller`.
        text: the response as JSON.
        input: the items of its request as JSON, each with an id.
        previous: which it went on from.
        task: what works on it in the background.
        holders: the store, where it can be asked for, and those that went on from it.
    """

    id: str
    owner: str
    text: bytes
    input: bytes
    previous: StoredResponse | None
    task: asyncio.Task[None] | None = None
    holders: int = field(default=0, init=False)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text) + len(self.input) + OVERHEAD

    @property
    def response(self) -> ResponseObject:
        return ResponseObject.model_validate_json(self.text)

    def items(self) -> list[dict[str, Any]]:
        """What the model was told, instructions left out, the oldest first."""
        return [item for turn in self.turns() for item in turn.own_items(with_output=turn is not self)]

    def conversation(self) -> list[InputItem]:
        """The same with the answer."""
        given = [item for turn in self.turns() for item in turn.own_items(with_output=True)]
        return [_ITEM.validate_python(item) for item in given]

    def own_items(self, *, with_output: bool) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.input)
        return [*items, *json.loads(self.text)["output"]] if with_output else items

    def turns(self) -> Iterator[StoredResponse]:
        """Those that it has gone on from, the first one first, and itself."""
        turns = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return reversed(turns)


class ResponseStore:
    """
    Attributes:
        bytes: of all that is kept.

    Args:
        megabytes: that it may hold; 0 turns it off.
    """

    def __init__(self, megabytes: int) -> None:
        self.bytes = 0
        self._limit = megabytes * MEGABYTE
        self._listed: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    def put(
        self, owner: str, response: ResponseObject, items: Sequence[InputItem], previous: StoredResponse | None
    ) -> StoredResponse | None:
        """Keep a response; None where it is larger, with all that it goes on from, than everything together may be.

        Args:
            items: of its request.
            previous: which it went on from.
        """
        stored = StoredResponse(response.id, owner, _dumped(response), _listable(items, response.id), previous)
        if sum(turn.size for turn in stored.turns()) > self._limit:
            return None
        self._listed[stored.id] = stored
        self._hold(stored)
        self._shrink()
        return stored

    def update(self, stored: StoredResponse, response: ResponseObject) -> None:
        """Put a response in the place of what it was before."""
        before = stored.size
        stored.text = _dumped(response)
        if stored.holders:
            self.bytes += stored.size - before
            self._shrink()

    def get(self, id: str, owner: str) -> StoredResponse:
        """Raises `NotFound`, also where it is somebody else's."""
        stored = self._find(id, owner)
        if stored is None:
            raise NotFound(f"Response with id {id!r} not found.{self._why()}", param="response_id")
        return stored

    def previous(self, id: str, owner: str) -> StoredResponse:
        """The response that a request goes on from.

        Raises:
            PreviousResponseNotFound: there is none, or it is somebody else's.
            InvalidRequest: it has not ended.
        """
        stored = self._find(id, owner)
        if stored is None:
            raise PreviousResponseNotFound(
                f"Previous response with id {id!r} not found.{self._why()}", param="previous_response_id"
            )
        if stored.task is not None:
            raise InvalidRequest(
                f"The response {id!r} is still being generated; go on from it once it is complete.",
                param="previous_response_id",
            )
        return stored

    def items(self, owner: str, ids: Sequence[str]) -> dict[str, InputItem]:
        """Items of stored responses, or of their inputs, by id.

        Raises:
            NotFound: there is no such item.
            InvalidRequest: one is named twice, as OpenAI's API does not allow either: a small request could stand for
                a conversation of any length.
        """
        by_response: dict[str, set[str]] = {}
        for id in ids:
            # Their ids hold that of the response, see `item_id()`.
            _, _, rest = id.partition("_")
            wanted = by_response.setdefault(f"resp_{rest.rpartition('_')[0]}", set())
            if id in wanted:
                raise InvalidRequest(f"input refers to the item {id!r} more than once.", param="input")
            wanted.add(id)
        found: dict[str, InputItem] = {}
        for response_id, wanted in by_response.items():
            stored = self._find(response_id, owner)
            for item in stored.own_items(with_output=True) if stored is not None else ():
                if item["id"] in wanted:
                    found.setdefault(item["id"], _ITEM.validate_python(item))
        for id in ids:
            if id not in found:
                raise NotFound(f"Item with id {id!r} not found.{self._why()}", param="input")
        return found

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response; what works on it ends."""
        await self.stop(stored)
        self._forget(stored)

    async def stop(self, stored: StoredResponse) -> None:
        """End what works on a response, if anything does."""
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)

    async def close(self) -> None:
        for stored in list(self._listed.values()):
            await self.stop(stored)

    def _why(self) -> str:
        if self.is_on:
            return " It was not to be stored, was deleted, or was dropped for newer ones (network.response_store_mb)."
        return " No responses are kept here, since network.response_store_mb is 0; send all items with each request."

    def _find(self, id: str, owner: str) -> StoredResponse | None:
        stored = self._listed.get(id)
        if stored is None or stored.owner != owner:
            return None
        self._listed.move_to_end(id)
        return stored

    def _shrink(self) -> None:
        while self.bytes > self._limit or len(self._listed) > MAX_RESPONSES:
            oldest = next((stored for stored in self._listed.values() if stored.task is None), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, stored: StoredResponse) -> None:
        if self._listed.pop(stored.id, None) is not None:
            self._release(stored)

    def _hold(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.holders += 1
            if stored.holders > 1:
                return
            self.bytes += stored.size
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.holders -= 1
            if stored.holders:
                return
            self.bytes -= stored.size
            stored = stored.previous


def _dumped(response: ResponseObject) -> bytes:
    return response.model_dump_json(by_alias=True).encode()


def _listable(items: Sequence[InputItem], response_id: str) -> bytes:
    """Items with the members that clients expect of those that they ask for."""
    listed = []
    for index, item in enumerate(items):
        values = item.model_dump(exclude_none=True)
        values.setdefault("id", item_id(_ID_KINDS.get(item.type, "item"), response_id, f"i{index}"))
        values.setdefault("status", "completed")
        if isinstance(item, MessageItem):
            _complete(values["content"], said_by_model=item.role == "assistant")
        elif isinstance(item, CallOutputItem):
            _complete(values["output"])
        listed.append(values)
    return json.dumps(listed, ensure_ascii=False).encode()


def _complete(parts: list[dict[str, Any]], *, said_by_model: bool = False) -> None:
    for part in parts:
        if said_by_model and part["type"] != "refusal":
            part.update(type="output_text", annotations=[])
        elif part["type"] == "input_image":
            part.setdefault("detail", "auto")


_ID_KINDS: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
