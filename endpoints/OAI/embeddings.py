"""Routes that embed texts, and that rank documents."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from backends.embeddings.manager import Embeddings, floats_of
from common.errors import InvalidRequest
from endpoints.admission import place_of
from endpoints.OAI.types.embedding import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    RankedDocument,
    RankedText,
    RerankRequest,
    RerankResponse,
    ScoredText,
)
from endpoints.routing import API, Handler, OpenAIRoute, WatchedRoute
from endpoints.state import ServerState, State, state_of


class EmbeddingRoute(WatchedRoute):
    """A route whose requests wait for an embedding model, in a queue of their own: those that generate shall not be
    refused because many texts are embedded."""

    async def serve(self, request: Request, handle: Handler) -> Response:
        place = request.state.place = state_of(request).embedding_queue.enter(request.state.owner)
        try:
            return await place.hold(super().serve(request, handle))
        finally:
            place.leave()


class OpenAIEmbeddingRoute(EmbeddingRoute, OpenAIRoute):
    pass


v1 = APIRouter(route_class=OpenAIEmbeddingRoute)  # below /v1


@v1.post("/embeddings", openapi_extra=API, response_model=EmbeddingList)
async def embeddings(body: EmbeddingRequest, request: Request, state: State) -> Response:
    """Vectors of texts, by a loaded embedding model."""
    begin = place_of(request).begin
    answer = await state.embeddings.embed(_named(body.model, state), body.inputs(), body.options(), begin=begin)
    return await rendered(partial(_listed, answer, as_text=body.encoding_format == "base64"))


@v1.post("/rerank", openapi_extra=API)
async def rerank(body: RerankRequest, request: Request, state: State) -> RerankResponse | list[ScoredText]:
    """Documents by how well they fit a query: as a loaded reranker says, or else by an embedding model's vectors."""
    documents = body.texts if body.documents is None else body.documents
    if documents is None:
        raise InvalidRequest("documents is missing: give the texts that are to be ranked.", param="documents")
    answer = await state.embeddings.rank(
        _named(body.model, state),
        body.query,
        documents,
        truncate=body.truncate,
        raw=body.raw_scores,
        begin=place_of(request).begin,
    )
    best = sorted(enumerate(answer.scores), key=lambda ranked: -ranked[1])[: body.top_n]
    shown = documents if body.return_documents else None
    if body.documents is None:
        return [ScoredText(index=index, score=score, text=shown[index] if shown else None) for index, score in best]
    results = [
        RankedDocument(index=index, relevance_score=score, document=RankedText(text=shown[index]) if shown else None)
        for index, score in best
    ]
    return RerankResponse(
        id=f"rerank-{uuid4().hex}", model=answer.model, results=results, usage=EmbeddingUsage.of(answer.tokens)
    )


def _named(model: str | None, state: ServerState) -> str | None:
    """None where the name is one of those that stand for whichever model answers."""
    return None if model is None or state.settings.model.is_dummy(model) else model


async def rendered(make: Callable[[], BaseModel]) -> Response:
    """What is made of vectors, as JSON: of two thousand it takes a second, in which others are served."""
    content = await asyncio.to_thread(lambda: make().model_dump_json())
    return Response(content, media_type="application/json")


def _listed(answer: Embeddings, *, as_text: bool) -> EmbeddingList:
    data = [
        Embedding(index=index, embedding=b64encode(vector).decode() if as_text else floats_of(vector))
        for index, vector in enumerate(answer.vectors)
    ]
    usage = EmbeddingUsage.of(answer.tokens)
    return EmbeddingList(data=data, model=answer.model, usage=usage)
