"""llama.cpp's own routes that generate text. Its OpenAI routes are ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from fastapi import APIRouter, Request, Response

from backends.client import EngineClient
from common.errors import check_characters
from endpoints.answering import Asked, respond
from endpoints.LlamaCpp.types.request import CompletionFields, InfillRequest, LlamaCppCompletionRequest
from endpoints.LlamaCpp.types.response import LlamaCppCompletion
from endpoints.LlamaCpp.utils.codec import CompletionCodec, JsonObject
from endpoints.LlamaCpp.utils.requests import (
    ReadyPrompt,
    answers_asked_for,
    completion_prompts,
    infill_prompt,
    wants_no_answer,
    with_text_biases,
)
from endpoints.OAI.utils.constraints import checked_constraints
from endpoints.routing import API, OpenAIQueuedRoute
from endpoints.state import ServerState, State, loaded_info
from endpoints.streaming import STREAMED, EventStream
from endpoints.wire import LLAMA_CPP

Answer: TypeAlias = JsonObject | list[JsonObject] | EventStream

router = APIRouter(route_class=OpenAIQueuedRoute)
# What a client picks with `response_fields` has no type, so the shape is for the OpenAPI document alone.
_Shape: TypeAlias = LlamaCppCompletion | JsonObject
_DOCUMENTED: dict[int | str, dict[str, Any]] = {200: STREAMED[200] | {"model": _Shape | list[_Shape]}}


@router.post("/completion", openapi_extra=API, response_model=None, responses=_DOCUMENTED)
async def completion(body: LlamaCppCompletionRequest, request: Request, response: Response, state: State) -> Answer:
    """The answer, or a list where there are several prompts."""

    async def prompts(client: EngineClient) -> list[ReadyPrompt]:
        return await completion_prompts(body, client)

    return await _answer(body, prompts, request, response, state)


@router.post("/infill", openapi_extra=API, response_model=None, responses=_DOCUMENTED)
async def infill(body: InfillRequest, request: Request, response: Response, state: State) -> Answer:
    """What stands between two texts."""

    async def prompts(client: EngineClient) -> list[ReadyPrompt]:
        info = loaded_info(client)
        prompt = infill_prompt(body, info.control_tokens)
        check_characters(len(prompt.text), info.max_seq_len, "input_prefix")
        return [prompt]

    return await _answer(body, prompts, request, response, state)


async def _answer(
    body: CompletionFields,
    prompts: Callable[[EngineClient], Awaitable[list[ReadyPrompt]]],
    request: Request,
    response: Response,
    state: ServerState,
) -> Answer:
    async def ask(client: EngineClient) -> Asked[JsonObject | list[JsonObject]]:
        fields = state.presets.apply(body, client.settings.model.sampler_preset)
        fields = await with_text_biases(fields, client)
        prompt_only = wants_no_answer(body, fields)
        constraints = await checked_constraints(fields)
        asked = answers_asked_for(fields, await prompts(client), constraints, prompt_only=prompt_only)
        codec = CompletionCodec(fields, asked, loaded_info(client), prompt_only=prompt_only)
        return Asked([one.request for one in asked], codec, fields)

    ping = body.sse_ping_interval
    return await respond(request, response, state, body.model, ask, stream=body.stream, wire=LLAMA_CPP, ping=ping)
