"""OpenAI's routes that generate text."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from backends.client import EngineClient
from endpoints.answering import Asked, respond
from endpoints.OAI.types.chat import ChatCompletion, ChatCompletionRequest
from endpoints.OAI.types.completion import Completion, CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec
from endpoints.OAI.utils.completion import CompletionCodec
from endpoints.OAI.utils.generation import new_envelope
from endpoints.OAI.utils.requests import asked_in_completion, begun_chat
from endpoints.routing import API, OpenAIQueuedRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import STREAMED, EventStream

v1 = APIRouter(route_class=OpenAIQueuedRoute)  # below /v1


@v1.post("/completions", openapi_extra=API, response_model=Completion, responses=STREAMED)
async def completions(
    body: CompletionRequest, request: Request, response: Response, state: State
) -> Completion | EventStream:
    async def ask(client: EngineClient) -> Asked[Completion]:
        fields, generations = await asked_in_completion(body, state, client)
        return Asked(generations, CompletionCodec(new_envelope("cmpl", loaded_info(client)), fields), fields)

    return await respond(request, response, state, body.model, ask, stream=body.stream)


@v1.post("/chat/completions", openapi_extra=API, response_model=ChatCompletion, responses=STREAMED)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, response: Response, state: State
) -> ChatCompletion | EventStream:
    async def ask(client: EngineClient) -> Asked[ChatCompletion]:
        turn, generations = await begun_chat(body, state, client)
        return Asked(generations, ChatCodec(new_envelope("chatcmpl", loaded_info(client)), turn), turn.body)

    return await respond(request, response, state, body.model, ask, stream=body.stream)
