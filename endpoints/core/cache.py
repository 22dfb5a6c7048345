"""Routes that show the prompt cache, explain what a prompt finds in it, and empty it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Query, Request, Response
from pydantic import Discriminator, Tag

from backends.exllamav3.plan_report import draw_plan
from common.caching import PlanBasis
from common.errors import AuthenticationFailed, InvalidRequest, Unsupported
from common.tabby_config import merge_load_settings
from endpoints.answering import asked_by
from endpoints.core.types.cache import CacheChange, CacheExplanation, CachePlan, CachePlanQuery, CacheReport
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.completion import CompletionRequest
from endpoints.OAI.utils.requests import asked_in_chat, asked_in_completion
from endpoints.routing import ADMIN, API, CoreRoute
from endpoints.state import ServerState, State
from endpoints.streaming import unless_disconnected

v1 = APIRouter(route_class=CoreRoute)  # below /v1

PNG: Final = "image/png"
_DRAWN: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {PNG: {}}}}


# --- what is cached -----------------------------------------------------------------------------------------------


@v1.get("/cache", openapi_extra=API)
async def show_cache(request: Request, state: State, model: str | None = None) -> CacheReport:
    """Capacity, use, hits and evictions of each tier; for an administrator each checkpoint as well.

    Of the model that answers requests which name none, or of another loaded one; so the next two.
    """
    client = state.require_ready(model)
    return CacheReport.of(client.name, await client.inspect(), with_entries=request.state.permission == "admin")


@v1.post("/cache/flush", openapi_extra=ADMIN)
async def flush_cache(state: State, model: str | None = None) -> CacheChange:
    """Write everything to the disk tier that is not there yet."""
    return CacheChange.model_validate(await state.require_ready(model).flush_cache())


@v1.post("/cache/clear", openapi_extra=ADMIN)
async def clear_cache(state: State, model: str | None = None) -> CacheChange:
    """Drop everything that no running request uses, in all tiers, and what is known of earlier prompts."""
    return CacheChange.model_validate(await state.require_ready(model).clear_cache())


# --- what a prompt finds ------------------------------------------------------------------------------------------


def _kind(body: object) -> str | None:
    if not isinstance(body, dict):
        return None
    for name, kind in (("messages", ChatCompletionRequest), ("prompt", CompletionRequest)):
        if body.get(name) is not None:
            return kind.__name__
    raise InvalidRequest("messages is missing: give messages, as for a chat, or a prompt.", param="messages")


_ExplainedRequest: TypeAlias = Annotated[
    Annotated[ChatCompletionRequest, Tag(ChatCompletionRequest.__name__)]
    | Annotated[CompletionRequest, Tag(CompletionRequest.__name__)],
    Discriminator(_kind),
]


@v1.post("/cache/explain", openapi_extra=API)
async def explain_cache(
    body: _ExplainedRequest, request: Request, state: State
) -> CacheExplanation | list[CacheExplanation]:
    """How much of a prompt is cached and why not more, without processing it. The body is that of the generating route.

    Compares with the prompts of the same key, for an administrator with those of all. Several prompts get a list.
    """
    client = state.require_ready(body.model)
    if isinstance(body, ChatCompletionRequest):
        turn, generations = await unless_disconnected(request, asked_in_chat(body, state, client))
        asked = asked_by(request, turn.body, generations[:1])
    else:
        fields, generations = await asked_in_completion(body, state, client)
        asked = asked_by(request, fields, generations[:: fields.per_prompt])
    explained = await asyncio.gather(*(client.explain(generation) for generation in asked))
    explanations = [CacheExplanation.model_validate(explanation) for explanation in explained]
    return explanations[0] if len(explanations) == 1 else explanations


# --- what checkpoints cost ----------------------------------------------------------------------------------------


@v1.get("/cache/plan", openapi_extra=API, response_model=CachePlan, responses=_DRAWN)
async def plan_checkpoints(
    query: Annotated[CachePlanQuery, Query()], request: Request, state: State
) -> CachePlan | Response:
    """Where a prompt of some length gets checkpoints, what they take, and what an edit costs then; also as a picture.

    Nothing is loaded or processed for it.
    """
    model, basis = await _plan_basis(query.model, request, state)
    drawn = query.format == "png" or (query.format is None and _wants_png(request))
    if basis is None:
        if drawn:
            raise Unsupported(
                f"{model} has no recurrent layers, so there are no checkpoints to draw. Ask for format json.",
                param="format",
            )
        return CachePlan(model=model, recurrent=False, prompt_tokens=query.prompt_tokens)
    plan = query.plan(basis)
    if drawn:
        return Response(await asyncio.to_thread(draw_plan, model, plan), media_type=PNG)
    return CachePlan.of(model, plan)


async def _plan_basis(name: str | None, request: Request, state: ServerState) -> tuple[str, PlanBasis | None]:
    """Of the loaded model, or of the one with that name."""
    if name is None or state.manager.known(name) is not None:
        client = state.shown_model(name)
        return client.name, client.plan
    if request.state.permission != "admin":
        raise AuthenticationFailed("The plan of a model that is not loaded needs the admin key.")
    directory = state.manager.resolve(name, "model")
    settings = merge_load_settings(state.settings, model_directory=directory, request={})
    return directory.name, await state.manager.plan_basis(directory, settings)


def _wants_png(request: Request) -> bool:
    return request.headers.get("accept", "").startswith(PNG)
