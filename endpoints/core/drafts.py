"""The route that lists draft models."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request

from common.model_folder import MODEL_CONFIG, created, list_draft_models
from endpoints.core.types.model_card import ModelCard, ModelList
from endpoints.routing import API, CoreRoute
from endpoints.state import State, loaded_info

v1 = APIRouter(route_class=CoreRoute)  # below /v1


@v1.get("/model/draft/list", openapi_extra=API)
async def list_drafters(request: Request, state: State) -> ModelList:
    """For an administrator the models in draft_model_dir; else the one that drafts for the loaded model."""
    folder = Path(state.settings.draft_model.draft_model_dir)
    client = state.manager.current
    if request.state.permission == "admin":
        names = list_draft_models(folder)
    elif client is not None and (drafter := loaded_info(client).draft_model_name) is not None:
        names = [drafter]
    else:
        names = []
    return ModelList(data=[ModelCard(id=name, created=created(folder / name / MODEL_CONFIG)) for name in names])
