"""OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from loguru import logger

from backends.client import EngineClient
from common.errors import InvalidRequest, Unsupported
from common.limits import ShortText
from endpoints.answering import Asked, respond
from endpoints.OAI.utils.requests import begun_chat, counted_in_chat
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.types.response import DeletedResponse, InputTokens, ItemList, ResponseObject
from endpoints.Responses.utils.background import begin_run, check_background, current_run
from endpoints.Responses.utils.begin import new_response
from endpoints.Responses.utils.codec import ResponseCodec, ResponseWire
from endpoints.Responses.utils.output import Output
from endpoints.Responses.utils.prepared import prepared
from endpoints.Responses.utils.store import StoredResponse
from endpoints.routing import API, OpenAIQueuedRoute, OpenAIRoute, WatchedRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import STREAMED, EventStream

# Names the tools and items of a request of which the model hears nothing.
LEFT_OUT_HEADER: Final = "X-Left-Out"

v1 = APIRouter(route_class=OpenAIQueuedRoute)  # below /v1
_stored = APIRouter(route_class=OpenAIRoute)


class _WatchedRoute(WatchedRoute, OpenAIRoute):
    pass


_counting = APIRouter(route_class=_WatchedRoute)


# --- generated ----------------------------------------------------------------------------------------------------


@v1.post("/responses", openapi_extra=API, response_model=ResponseObject, responses=STREAMED)
async def create_response(
    body: ResponsesRequest, request: Request, response: Response, state: State
) -> ResponseObject | EventStream:
    store, owner, run = state.responses, request.state.owner, current_run()
    if run is not None:
        asked = run.asked
    else:
        if body.background:
            check_background(body, store)
        asked = await prepared(body, store, owner)
        if body.background:
            return await begin_run(request, store, asked, owner)

    def keep(ended: ResponseObject) -> None:
        if run is not None:
            store.update(run.stored, ended)
        elif asked.is_stored:
            store.put(owner, ended, asked.items, asked.previous)

    async def ask(client: EngineClient) -> Asked[ResponseObject]:
        with asked.chat.paths.as_sent():
            turn, generations = await begun_chat(asked.chat.body, state, client)
        tools, model = asked.chat.tools, loaded_info(client).name
        begun = new_response(body, turn.body, tools, model=model, store=asked.is_stored)
        if run is not None:
            begun = run.begun(begun)
            store.update(run.stored, begun)
        codec = ResponseCodec(begun, turn.reading(), Output.of(body, tools, begun.id), keep)
        # A preset may ask for more answers; a response has one.
        return Asked(generations[:1], codec, turn.body)

    def not_begun() -> ResponseObject:
        return new_response(body, asked.chat.body, asked.chat.tools, model=body.model or "", store=asked.is_stored)

    wire = ResponseWire(not_begun)
    answer = await respond(request, response, state, body.model, ask, stream=body.stream, wire=wire)
    if left_out := ", ".join(asked.chat.left_out):
        logger.info("There is no {} here; the request goes on without", left_out)
        (answer if isinstance(answer, EventStream) else response).headers[LEFT_OUT_HEADER] = left_out
    return answer


@_counting.post("/responses/input_tokens", openapi_extra=API)
async def count_input_tokens(body: ResponsesRequest, request: Request, state: State) -> InputTokens:
    """Tokens of the prompt that the same body would make."""
    asked = await prepared(body, state.responses, request.state.owner)
    client = await state.serving(request, body.model)
    with asked.chat.paths.as_sent():
        return InputTokens(input_tokens=await counted_in_chat(asked.chat.body, state, client))


# --- stored -------------------------------------------------------------------------------------------------------


@_stored.get("/responses/{response_id}", openapi_extra=API, response_model=ResponseObject)
async def show_response(response_id: str, request: Request, state: State, stream: bool = False) -> Response:
    if stream:
        raise Unsupported("stream: a stored response is not streamed again; ask for it without.", param="stream")
    return _json(state.responses.get(response_id, request.state.owner))


@_stored.delete("/responses/{response_id}", openapi_extra=API)
async def delete_response(response_id: str, request: Request, state: State) -> DeletedResponse:
    """Responses that went on from it stay as they are."""
    await state.responses.delete(state.responses.get(response_id, request.state.owner))
    return DeletedResponse(id=response_id)


@_stored.post("/responses/{response_id}/cancel", openapi_extra=API, response_model=ResponseObject)
async def cancel_response(response_id: str, request: Request, state: State) -> Response:
    """End a response that is generated in the background. One that has ended stays as it is."""
    stored = state.responses.get(response_id, request.state.owner)
    if not stored.response.background:
        raise InvalidRequest(
            "Cannot cancel a synchronous response. It ends when its client closes the connection.", param="response_id"
        )
    await state.responses.stop(stored)
    return _json(stored)


@_stored.get("/responses/{response_id}/input_items", openapi_extra=API)
async def list_input_items(
    response_id: str,
    request: Request,
    state: State,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: ShortText | None = None,
) -> ItemList:
    """What the model was told, with the answers that the request went on from."""
    items = state.responses.get(response_id, request.state.owner).items()
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: there is no item with id {after!r}.", param="after")
        items = items[places[0] + 1 :]
    data = items[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return ItemList(data=data, first_id=first, last_id=last, has_more=len(items) > limit)


@_stored.post("/responses/compact", openapi_extra=API, response_model=None)
async def compact_response() -> None:
    """Not available: a conversation that is too long has to be shortened by its client."""
    raise Unsupported(
        "/v1/responses/compact is not available here: let the client summarise the conversation by an ordinary request."
    )


def _json(stored: StoredResponse) -> Response:
    return Response(stored.text, media_type="application/json")


v1.include_router(_counting)
v1.include_router(_stored)
