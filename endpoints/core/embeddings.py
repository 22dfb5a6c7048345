"""TabbyAPI's routes for embedding models, of which several may be loaded."""

from __future__ import annotations

from fastapi import APIRouter, Request

from common.model_folder import created
from endpoints.core.types.embedding import (
    EmbeddingCard,
    EmbeddingLoaded,
    EmbeddingLoadRequest,
    EmbeddingModelList,
    EmbeddingUnloadRequest,
)
from endpoints.routing import ADMIN, API, CoreRoute
from endpoints.state import State

v1 = APIRouter(route_class=CoreRoute)  # below /v1


@v1.get("/model/embedding", openapi_extra=API)
async def current_embedding_model(state: State) -> EmbeddingCard:
    """The model that was loaded first."""
    name, client = state.embeddings.require()
    return EmbeddingCard.of(name, created(client.directory), client)


@v1.get("/model/embedding/list", openapi_extra=API)
async def list_embedding_models(request: Request, state: State) -> EmbeddingModelList:
    """The loaded models first; for an administrator then every other folder that may hold one."""
    manager = state.embeddings
    cards = [EmbeddingCard.of(name, created(client.directory), client) for name, client in manager.loaded.items()]
    if request.state.permission == "admin":
        others = (name for name in manager.list_models() if name not in manager.loaded)
        cards += [EmbeddingCard(id=name, created=created(manager.model_dir / name)) for name in others]
    return EmbeddingModelList(data=cards)


@v1.post("/model/embedding/load", openapi_extra=ADMIN)
async def load_embedding_model(body: EmbeddingLoadRequest, state: State) -> EmbeddingLoaded:
    """Load an embedding model or a reranker beside those that are loaded; one that is loaded already stays as it is.

    Answers when it is ready. Closing the connection does not stop the load.
    """
    await state.embeddings.load(body.embedding_model_name, body.embeddings_device)
    return EmbeddingLoaded()


@v1.post("/model/embedding/unload", openapi_extra=ADMIN)
async def unload_embedding_models(state: State, body: EmbeddingUnloadRequest | None = None) -> None:
    """End a loaded embedding model, or all, and the requests that they work on."""
    await state.embeddings.unload(body.embedding_model_name if body is not None else None)
