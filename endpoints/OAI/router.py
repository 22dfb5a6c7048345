"""OpenAI's routes that generate text."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from loguru import logger

from endpoints.OAI.types.chat import ChatCompletion, ChatCompletionRequest
from endpoints.OAI.types.completion import Completion, CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec
from endpoints.OAI.utils.completion import CompletionCodec
from endpoints.OAI.utils.generation import new_envelope, respond
from endpoints.OAI.utils.requests import asked_in_chat, asked_in_completion
from endpoints.routing import API, OpenAIQueuedRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import STREAMED, EventStream

v1 = APIRouter(route_class=OpenAIQueuedRoute)  # below /v1


@v1.post("/completions", openapi_extra=API, response_model=Completion, responses=STREAMED)
async def completions(
    body: CompletionRequest, request: Request, response: Response, state: State
) -> Completion | EventStream:
    client = state.manager.require()
    body, generations = await asked_in_completion(body, state, client)
    codec = CompletionCodec(new_envelope("cmpl", loaded_info(client)), body)
    return await respond(request, response, state, client, generations, codec, body)


@v1.post("/chat/completions", openapi_extra=API, response_model=ChatCompletion, responses=STREAMED)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, response: Response, state: State
) -> ChatCompletion | EventStream:
    client = state.manager.require()
    turn, generations = await asked_in_chat(body, state, client)
    if (broken := turn.prompt.broken) is not None:
        logger.info("{}", broken.describe(quote=state.settings.logging.log_prompt))
    if turn.prompt.tools.declared:
        await state.warn_tools_unknown(client)
    codec = ChatCodec(new_envelope("chatcmpl", loaded_info(client)), turn)
    return await respond(request, response, state, client, generations, codec, turn.body)
