"""Anthropic's routes."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response

from backends.client import EngineClient
from common.logger import request_id
from endpoints.answering import Asked, respond
from endpoints.Anthropic.types.request import CountTokensRequest, MessagesRequest
from endpoints.Anthropic.types.response import MessageResponse, TokenCount
from endpoints.Anthropic.utils.codec import MessageCodec
from endpoints.Anthropic.utils.errors import ANTHROPIC, ERROR_RESPONSES, anthropic_error
from endpoints.Anthropic.utils.requests import as_chat
from endpoints.OAI.utils.requests import begun_chat, counted_in_chat
from endpoints.routing import API, ApiRoute, Handler, QueuedRoute, WatchedRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import STREAMED, EventStream


class _AnthropicRoute(ApiRoute):
    render_error = staticmethod(anthropic_error)

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def named(request: Request) -> Response:
            response = await handle(request)
            response.headers["request-id"] = request_id.get()
            return response

        return named


class _WatchedRoute(WatchedRoute, _AnthropicRoute):
    pass


class _QueuedRoute(QueuedRoute, _AnthropicRoute):
    pass


v1 = APIRouter()  # below /v1
_counting = APIRouter(route_class=_WatchedRoute)
_generating = APIRouter(route_class=_QueuedRoute)


@_generating.post("/messages", openapi_extra=API, response_model=MessageResponse, responses=STREAMED | ERROR_RESPONSES)
async def messages(
    body: MessagesRequest, request: Request, response: Response, state: State
) -> MessageResponse | EventStream:
    async def ask(client: EngineClient) -> Asked[MessageResponse]:
        asked = await asyncio.to_thread(as_chat, body, client.settings.model)  # long conversations take a second
        with asked.paths.as_sent():
            turn, generations = await begun_chat(asked.chat, state, client)
        if body.wants_no_answer:  # the engine cannot but generate a token for that
            generations = [msgspec.structs.replace(one, max_tokens=1, min_tokens=0) for one in generations]
        codec = MessageCodec(
            loaded_info(client).name,
            turn,
            thoughts=asked.thoughts,
            prompt_only=body.wants_no_answer,
        )
        return Asked(generations, codec, turn.body)

    return await respond(request, response, state, body.model, ask, stream=body.stream, wire=ANTHROPIC)


@_counting.post("/messages/count_tokens", openapi_extra=API, responses=ERROR_RESPONSES)
async def count_tokens(body: CountTokensRequest, request: Request, state: State) -> TokenCount:
    """Tokens of the prompt that the same body makes for `/v1/messages`."""
    client = await state.serving(request, body.model)
    asked = await asyncio.to_thread(as_chat, body, client.settings.model)
    with asked.paths.as_sent():
        return TokenCount(input_tokens=await counted_in_chat(asked.chat, state, client))


v1.include_router(_generating)
v1.include_router(_counting)
