"""OpenAI's routes that generate text."""

from __future__ import annotations

from fastapi import APIRouter, Request

from endpoints.OAI.types.chat import ChatCompletion, ChatCompletionRequest
from endpoints.OAI.types.completion import Completion, CompletionRequest
from endpoints.OAI.utils.chat import ChatCodec, chat_generation_requests
from endpoints.OAI.utils.completion import CompletionCodec, completion_generation_requests
from endpoints.OAI.utils.generation import new_envelope, respond
from endpoints.routing import API, OpenAIRoute
from endpoints.state import State, loaded_info
from endpoints.streaming import EventStream

v1 = APIRouter(route_class=OpenAIRoute)  # below /v1


@v1.post("/completions", openapi_extra=API, response_model=Completion)
async def completions(body: CompletionRequest, request: Request, state: State) -> Completion | EventStream:
    client = state.manager.require()
    body = state.presets.apply(body)
    generations = completion_generation_requests(body)
    codec = CompletionCodec(
        new_envelope("cmpl", loaded_info(client)),
        body.n,
        len(body.prompt),
        include_usage=body.stream_options.include_usage,
    )
    return await respond(request, state, client, generations, codec, stream=body.stream)


@v1.post("/chat/completions", openapi_extra=API, response_model=ChatCompletion)
async def chat_completions(body: ChatCompletionRequest, request: Request, state: State) -> ChatCompletion | EventStream:
    client = state.manager.require()
    body = state.presets.apply(body)
    generations = chat_generation_requests(body, state.prompt_writer(client))
    codec = ChatCodec(
        new_envelope("chatcmpl", loaded_info(client)),
        body.n,
        include_usage=body.stream_options.include_usage,
    )
    return await respond(request, state, client, generations, codec, stream=body.stream)
