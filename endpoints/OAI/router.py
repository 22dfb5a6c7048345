"""OpenAI's routes that generate text."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from loguru import logger

from endpoints.OAI.types.chat import ChatCompletion, ChatCompletionRequest
from endpoints.OAI.types.completion import Completion, CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec, ChatTurn
from endpoints.OAI.utils.completion import CompletionCodec, completion_generation_requests
from endpoints.OAI.utils.constraints import checked_constraints
from endpoints.OAI.utils.generation import new_envelope, respond
from endpoints.routing import API, OpenAIRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import EventStream

v1 = APIRouter(route_class=OpenAIRoute)  # below /v1


@v1.post("/completions", openapi_extra=API, response_model=Completion)
async def completions(
    body: CompletionRequest, request: Request, response: Response, state: State
) -> Completion | EventStream:
    client = state.manager.require()
    info = loaded_info(client)
    body = state.presets.apply(body, client.settings.model.sampler_preset)
    constraints = await checked_constraints(body)
    generations = completion_generation_requests(body, constraints, info.control_tokens)
    codec = CompletionCodec(new_envelope("cmpl", info), body)
    return await respond(request, response, state, client, generations, codec, body)


@v1.post("/chat/completions", openapi_extra=API, response_model=ChatCompletion)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, response: Response, state: State
) -> ChatCompletion | EventStream:
    client = state.manager.require()
    info = loaded_info(client)
    body = state.presets.apply(body, client.settings.model.sampler_preset)
    given = await checked_constraints(body)
    turn = ChatTurn(body, state.prompt_writer(client))
    if (broken := turn.prompt.broken) is not None:
        logger.info("{}", broken.describe(quote=state.settings.logging.log_prompt))
    if turn.prompt.tools.declared:
        state.warn_tools_unknown(client)
    constraints = await asyncio.to_thread(turn.constraints, given, info.control_tokens)
    codec = ChatCodec(new_envelope("chatcmpl", info), turn)
    return await respond(request, response, state, client, turn.requests(constraints), codec, body)
