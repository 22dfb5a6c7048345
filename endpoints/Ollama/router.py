"""Ollama's routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from backends.client import EngineClient
from backends.embeddings.manager import Embeddings
from backends.embeddings.messages import EmbedOptions
from common.errors import AuthenticationFailed, InvalidRequest, ModelNotFound, Unsupported
from common.names import tagged, untagged
from endpoints.admission import place_of
from endpoints.answering import Ask, Asked, respond
from endpoints.core.models import may_load
from endpoints.OAI.embeddings import EmbeddingRoute, rendered
from endpoints.OAI.utils.requests import asked_in_completion, begun_chat
from endpoints.Ollama.types.model import ListedModel, ModelList, ModelShown, RunningModels, Version
from endpoints.Ollama.types.request import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    GenerationRequest,
    ModelRequest,
    ShowRequest,
)
from endpoints.Ollama.types.response import (
    Answer,
    ChatAnswer,
    DoneReason,
    Embedded,
    EmbeddedPrompt,
    GenerateAnswer,
    Message,
)
from endpoints.Ollama.utils.codec import ChatCodec, GenerateCodec, Stopwatch, as_they_are
from endpoints.Ollama.utils.models import ModelFiles, running, shown, visible_models
from endpoints.Ollama.utils.requests import as_chat, as_completion, as_one_turn
from endpoints.Ollama.utils.wire import ERROR_RESPONSES, OLLAMA, ollama_error
from endpoints.routing import API, OPEN, AnyTypeRoute, QueuedRoute
from endpoints.state import ServerState, State
from endpoints.streaming import EventStream

A = TypeVar("A", bound=Answer)


class OllamaRoute(AnyTypeRoute):
    render_error = staticmethod(ollama_error)


class OllamaQueuedRoute(QueuedRoute, OllamaRoute):
    pass


class OllamaEmbeddingRoute(EmbeddingRoute, OllamaRoute):
    pass


router = APIRouter(route_class=OllamaRoute, responses=ERROR_RESPONSES)
generating = APIRouter(route_class=OllamaQueuedRoute, responses=ERROR_RESPONSES)
embedding = APIRouter(route_class=OllamaEmbeddingRoute, responses=ERROR_RESPONSES)
# In the OpenAPI document, beside the JSON of a route that may stream.
_STREAMED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {OLLAMA.media_type: {}}}}


# --- generation ---------------------------------------------------------------------------------------------------


@generating.post("/api/chat", openapi_extra=API, response_model=ChatAnswer, responses=_STREAMED)
async def chat(body: ChatRequest, request: Request, response: Response, state: State) -> ChatAnswer | EventStream:
    """The next turn of a chat; without messages the model is loaded or unloaded."""
    if not body.messages:
        model, reason = await _load_or_unload(body, request, state)
        return ChatAnswer(model=model, message=Message(), done=True, done_reason=reason)
    stopwatch = Stopwatch()
    completion, paths = as_chat(body, keeps=may_load(request, state))

    async def ask(client: EngineClient) -> Asked[ChatAnswer]:
        stopwatch.loaded()
        with paths.as_sent():
            turn, generations = await begun_chat(completion, state, client)
        codec = ChatCodec(_told_name(body, state, client), turn.reading().read, stopwatch, body.alternatives)
        return Asked(generations, codec, turn.body)

    return await _answer(body, request, response, state, ask)


@generating.post("/api/generate", openapi_extra=API, response_model=GenerateAnswer, responses=_STREAMED)
async def generate(
    body: GenerateRequest, request: Request, response: Response, state: State
) -> GenerateAnswer | EventStream:
    """What follows a prompt, as a user's message unless it is raw; without one the model is loaded or unloaded."""
    if body.is_empty:
        model, reason = await _load_or_unload(body, request, state)
        return GenerateAnswer(model=model, done=True, done_reason=reason)
    stopwatch, keeps = Stopwatch(), may_load(request, state)

    async def ask(client: EngineClient) -> Asked[GenerateAnswer]:
        stopwatch.loaded()
        name = _told_name(body, state, client)
        if body.raw or body.suffix or await state.template_of(client) is None:
            completion, paths = as_completion(body, keeps=keeps)
            with paths.as_sent():
                fields, generations = await asked_in_completion(completion, state, client)
            return Asked(generations, GenerateCodec(name, as_they_are, stopwatch, body.alternatives), fields)
        one_turn, paths = as_one_turn(body, keeps=keeps)
        with paths.as_sent():
            turn, generations = await begun_chat(one_turn, state, client)
        codec = GenerateCodec(name, turn.reading().read, stopwatch, body.alternatives)
        return Asked(generations, codec, turn.body)

    return await _answer(body, request, response, state, ask)


async def _answer(
    body: GenerationRequest, request: Request, response: Response, state: ServerState, ask: Ask[A]
) -> A | EventStream:
    keep_alive = body.keep_alive if may_load(request, state) else None
    name = untagged(body.model)
    with _named(body.model):
        return await respond(
            request, response, state, name, ask, stream=body.stream, wire=OLLAMA, keep_alive=keep_alive
        )


async def _load_or_unload(body: GenerationRequest, request: Request, state: ServerState) -> tuple[str, DoneReason]:
    """What a request without a prompt is for. Returns the model's name, and what was done."""
    name, loads = untagged(body.model), may_load(request, state)
    if body.keep_alive != 0:
        with _named(body.model):
            client = await state.serving(request, name, keep_alive=body.keep_alive if loads else None)
        return _told_name(body, state, client), "load"
    if not loads:
        raise AuthenticationFailed(
            "Only the admin key unloads models, unless model.inline_model_loading lets every key load them again."
        )
    state.manager.keep(_directory(body, request, state), 0)
    return body.model, "unload"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Around what looks for a model: says that there is none in Ollama's words, which clients look for."""
    try:
        yield
    except ModelNotFound as error:
        raise ModelNotFound(f"model '{name}' not found. {error.message}", param="model") from error


def _told_name(body: GenerationRequest, state: ServerState, client: EngineClient) -> str:
    """The name of the model that answers, as the request has it where it means that model."""
    return body.model if state.manager.known(untagged(body.model)) is client else tagged(client.name)


# --- embeddings ---------------------------------------------------------------------------------------------------


@embedding.post("/api/embed", openapi_extra=API, response_model=Embedded)
async def embed(body: EmbedRequest, request: Request, state: State) -> Response:
    """Vectors of texts, of length 1."""
    stopwatch = Stopwatch()
    options = EmbedOptions(dimensions=body.dimensions, truncate=body.truncate)
    answer = await _vectors(body, body.texts, options, request, state) if body.texts else Embeddings("", [], 0)
    return await rendered(
        lambda: Embedded(
            model=body.model,
            embeddings=answer.floats(),
            total_duration=stopwatch.total_duration,
            load_duration=stopwatch.load_duration,
            prompt_eval_count=answer.tokens,
        )
    )


@embedding.post("/api/embeddings", openapi_extra=API, response_model=EmbeddedPrompt)
async def embed_prompt(body: EmbeddingsRequest, request: Request, state: State) -> Response:
    """The vector of a text, of any length."""
    options = EmbedOptions(normalize=False, truncate=True)
    answer = await _vectors(body, [body.prompt], options, request, state, param="prompt")
    return await rendered(lambda: EmbeddedPrompt(embedding=answer.floats()[0]))


async def _vectors(
    body: ModelRequest,
    texts: list[str],
    options: EmbedOptions,
    request: Request,
    state: ServerState,
    *,
    param: str = "input",
) -> Embeddings:
    begin = place_of(request).begin
    with _named(body.model):
        return await state.embeddings.embed(untagged(body.model), texts, options, param=param, begin=begin)


# --- models -------------------------------------------------------------------------------------------------------


@router.get("/api/tags", openapi_extra=API)
async def tags(request: Request, state: State) -> ModelList:
    """The models that the caller may use or load."""
    models = visible_models(request, state)

    def listed() -> list[ListedModel]:
        return [ModelFiles.read(directory, name).listed() for name, directory in models.items()]

    return ModelList(models=await asyncio.to_thread(listed))


@router.post("/api/show", openapi_extra=API)
async def show(body: ShowRequest, request: Request, state: State) -> ModelShown:
    """What there is to know of a model, loaded or not."""
    return await shown(state, _directory(body, request, state), untagged(body.model))


def _directory(body: ModelRequest, request: Request, state: ServerState) -> Path:
    """Of a model that the caller may use or load."""
    name, visible = untagged(body.model), visible_models(request, state)
    directory = visible.get(name)
    if directory is None or name in state.manager.aliases:
        with suppress(InvalidRequest, ModelNotFound):
            known = state.manager.known(name)
            directory = known.directory if known is not None else state.manager.resolve(name)
    if directory is None or not (may_load(request, state) or directory in visible.values()):
        raise ModelNotFound(f"model '{body.model}' not found. /api/tags lists those that there are.", param="model")
    return directory


@router.get("/api/ps", openapi_extra=API)
async def ps(request: Request, state: State) -> RunningModels:
    """The models that are up."""
    return RunningModels(models=await running(request, state))


@router.post("/api/pull", openapi_extra=API)
async def pull() -> None:
    """Refused: models come from another place in another form."""
    raise Unsupported(
        "Models of Ollama's registry do not run here. Download one in EXL3 or safetensors from a hub with "
        "POST /v1/download."
    )


@router.post("/api/create", openapi_extra=API)
@router.post("/api/copy", openapi_extra=API)
@router.post("/api/push", openapi_extra=API)
@router.delete("/api/delete", openapi_extra=API)
async def change_models() -> None:
    """Refused: models are folders."""
    raise Unsupported(
        "Models are folders in model.model_dir here, and are not changed by this API. POST /v1/download adds one; "
        "aliases (model.aliases) and a tabby_config.yml in its folder give it names and settings."
    )


@router.post("/api/blobs/{digest}", openapi_extra=API)
@router.head("/api/blobs/{digest}", openapi_extra=API, include_in_schema=False)
async def add_blob(digest: str) -> None:
    """Refused: models are folders."""
    await change_models()


# --- the server ---------------------------------------------------------------------------------------------------


@router.get("/api/version", openapi_extra=OPEN)
@router.head("/api/version", openapi_extra=OPEN, include_in_schema=False)
async def version() -> Version:
    return Version()


@router.get("/", openapi_extra=OPEN, response_class=PlainTextResponse)
@router.head("/", openapi_extra=OPEN, include_in_schema=False)
async def greeting() -> PlainTextResponse:
    """What clients look for to see that a server is there."""
    return PlainTextResponse("Ollama is running")
