"""llama.cpp's own routes that generate text. Its OpenAI routes are ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from fastapi import APIRouter, Request, Response

from backends.client import EngineClient
from common.errors import check_characters
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
from endpoints.OAI.utils.generation import respond
from endpoints.routing import API, OpenAIQueuedRoute
from endpoints.state import ServerState, State, loaded_info
from endpoints.streaming import STREAMED, EventStream

Answer: TypeAlias = JsonObject | list[JsonObject] | EventStream

router = APIRouter(route_class=OpenAIQueuedRoute)
# What a client picks with `response_fields` has no type, so the shape is for the OpenAPI document alone.
_Shape: TypeAlias = LlamaCppCompletion | JsonObject
_DOCUMENTED: dict[int | str, dict[str, Any]] = {200: STREAMED[200] | {"model": _Shape | list[_Shape]}}


@router.post("/completion", openapi_extra=API, response_model=None, responses=_DOCUMENTED)
async def completion(body: LlamaCppCompletionRequest, request: Request, response: Response, state: State) -> Answer:
    """The answer, or a list where there are several prompts."""
    client = state.manager.require()
    return await _answer(body, await completion_prompts(body, client), client, request, response, state)


@router.post("/infill", openapi_extra=API, response_model=None, responses=_DOCUMENTED)
async def infill(body: InfillRequest, request: Request, response: Response, state: State) -> Answer:
    """What stands between two texts."""
    client = state.manager.require()
    info = loaded_info(client)
    prompt = infill_prompt(body, info.control_tokens)
    check_characters(len(prompt.text), info.max_seq_len, "input_prefix")
    return await _answer(body, [prompt], client, request, response, state)


async def _answer(
    body: CompletionFields,
    prompts: Sequence[ReadyPrompt],
    client: EngineClient,
    request: Request,
    response: Response,
    state: ServerState,
) -> Answer:
    fields = state.presets.apply(body, client.settings.model.sampler_preset)
    fields = await with_text_biases(fields, client)
    prompt_only = wants_no_answer(body, fields)
    constraints = await checked_constraints(fields)
    asked = answers_asked_for(fields, prompts, constraints, prompt_only=prompt_only)
    codec = CompletionCodec(fields, asked, loaded_info(client), prompt_only=prompt_only)
    generations = [one.request for one in asked]
    ping = fields.sse_ping_interval
    # A stream ends with the event that says `"stop": true`.
    return await respond(request, response, state, client, generations, codec, fields, ping=ping, terminator=None)
