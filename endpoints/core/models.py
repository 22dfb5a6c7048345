"""Routes of models: which there are, how they are set up, loading and unloading them, and what happens to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Request, Response

from backends.manager import ModelManager
from backends.messages import LoadProgress
from backends.model_events import Follower, ModelEvent
from common.config_models import LoadSettings
from common.errors import InvalidRequest, ModelNotFound
from common.model_folder import MODEL_CONFIG, created
from common.tabby_config import merge_load_settings
from endpoints.Anthropic.types.response import Model, ModelPage
from endpoints.Anthropic.utils.models import anthropic_model, anthropic_models, is_anthropic
from endpoints.core.types.model import ModelLoadRequest, ModelUnloadRequest
from endpoints.core.types.model_card import (
    CardStatus,
    LoadProgressEvent,
    ModelCard,
    ModelEventFrame,
    ModelList,
    model_parameters,
)
from endpoints.routing import ADMIN, API, CoreRoute
from endpoints.state import ServerState, State, check_load, loaded_info
from endpoints.streaming import STREAMED, EventStream, start_early
from endpoints.wire import CORE

v1 = APIRouter(route_class=CoreRoute)  # below /v1


# --- which there are ----------------------------------------------------------------------------------------------


@v1.get("/models", openapi_extra=API)
@v1.get("/model/list", openapi_extra=API)
async def list_models(request: Request, state: State) -> ModelList | ModelPage:
    """The names that requests may give, and how it is with their models; the loaded ones before the others.

    Those are the loaded models and, for an administrator or with inline_model_loading, all that can be loaded. A client
    that sends the header anthropic-version gets them in the form of Anthropic's API.
    """
    cards = _visible_cards(request, state)
    if is_anthropic(request):
        return anthropic_models({name: card.created for name, card in cards.items()})
    return ModelList(data=list(cards.values()))


@v1.get("/models/{model_id:path}", openapi_extra=API)
async def retrieve_model(model_id: str, request: Request, state: State) -> ModelCard | Model:
    card = _visible_cards(request, state).get(model_id)
    if card is None:
        raise ModelNotFound(f"There is no model {model_id!r}; /v1/models lists those that you can use.", param="model")
    return anthropic_model(model_id, card.created) if is_anthropic(request) else card


@v1.get("/model", openapi_extra=API)
async def current_model(state: State, name: str | None = None) -> ModelCard:
    """The model that answers requests which name none, or another loaded one, and how it is set up."""
    client = state.shown_model(name)
    created_at = created(client.directory / MODEL_CONFIG)
    parameters = model_parameters(
        client,
        loaded_info(client),
        await state.template_of(client),
        await state.syntax_of(client),
        await state.warnings_of(client),
        created_at,
    )
    status = CardStatus.of(state.manager.status(client.directory))
    return ModelCard(id=client.name, created=created_at, status=status, parameters=parameters)


def _visible_cards(request: Request, state: ServerState) -> dict[str, ModelCard]:
    """By id. Names that stand for whichever model answers come first, as clients that need them take the first."""
    manager, selection = state.manager, state.settings.model
    cards: dict[str, ModelCard] = {}
    if selection.use_dummy_models:
        answering = manager.current or manager.sleeping
        for name in selection.dummy_model_names:
            cards[name] = (
                ModelCard(id=name, created=0) if answering is None else _card(name, manager, answering.directory)
            )
    folders = visible_folders(request, state)
    for name, directory in folders.items():
        cards.setdefault(name, _card(name, manager, directory))
    for alias in manager.aliases:
        with suppress(InvalidRequest, ModelNotFound):  # its folder is not there at the moment
            directory = manager.resolve(alias)
            if not selection.is_dummy(alias) and (may_load(request, state) or directory in folders.values()):
                cards[alias] = _card(alias, manager, directory)  # also in place of that of a folder of the name
    for name, client in state.embeddings.loaded.items():
        # Its folder may lie among those of language models, and then looks like one that is not loaded.
        if (card := cards.get(name)) is None or (card.status is not None and card.status.value == "unloaded"):
            status = CardStatus(value="loaded", reason=client.failure, requests=client.running)
            cards[name] = ModelCard(id=name, created=created(client.directory / MODEL_CONFIG), status=status)
    return cards


def visible_folders(request: Request, state: ServerState) -> dict[str, Path]:
    """By name, those of the models that the caller may use or load: first what is up, or will be when it is needed."""
    manager = state.manager
    any_model = may_load(request, state)
    known = [status for status in manager.statuses() if any_model or status.answers]
    folders: dict[str, Path] = {}
    for status in known:
        folders.setdefault(manager.name_of(status.directory), status.directory)
    for name in manager.list_models() if any_model else ():
        folders.setdefault(name, manager.model_dir.absolute() / name)
    return folders


def may_load(request: Request, state: ServerState) -> bool:
    """Whether the caller may have any model loaded, one way or another."""
    return request.state.permission == "admin" or state.settings.model.inline_model_loading


def _card(name: str, manager: ModelManager, directory: Path) -> ModelCard:
    return ModelCard(
        id=name, created=created(directory / MODEL_CONFIG), status=CardStatus.of(manager.status(directory))
    )


# --- loading ------------------------------------------------------------------------------------------------------


@v1.post("/model/load", openapi_extra=ADMIN, response_model=LoadProgressEvent, responses=STREAMED)
async def load_model(body: ModelLoadRequest, state: State) -> Response:
    """Load a model, which then answers requests that name none.

    Where there is room it is loaded beside the others, else in place of that which was unused for longest; this one
    keeps answering until the new one has been checked. The stream tells the progress. Closing the connection does not
    stop the load.
    """
    directory = state.manager.resolve(body.model_name)
    settings = merge_load_settings(state.settings, model_directory=directory, request=body.parameters())
    await check_load(directory, settings, state.presets)
    events = await start_early(_load_events(state.manager, directory, settings, skip_queue=body.skip_queue))
    return EventStream(events, wire=CORE, ping=state.settings.network.sse_ping_interval)


async def _load_events(
    manager: ModelManager, directory: Path, settings: LoadSettings, *, skip_queue: bool
) -> AsyncGenerator[str]:
    """One event for each module, one more when a component is complete.

    The last module of a component is not its end: the model is ready when the manager says so.
    """
    last: LoadProgress | None = None
    async for progress in manager.load(directory, settings, skip_queue=skip_queue):
        if last is not None and last.component != progress.component:
            yield _load_event(last, finished=True)
        yield _load_event(progress)
        last = progress
    if last is not None:
        yield _load_event(last, finished=True)


def _load_event(progress: LoadProgress, *, finished: bool = False) -> str:
    return LoadProgressEvent.of(progress, finished=finished).model_dump_json()


@v1.post("/model/unload", openapi_extra=ADMIN)
async def unload_model(state: State, body: ModelUnloadRequest | None = None) -> None:
    """End a loaded model, and the requests that it works on."""
    name = body.model_name if body is not None else None
    if name is None:
        await state.manager.unload()
        return
    known = state.manager.known(name)
    await state.manager.unload(known.directory if known is not None else state.manager.resolve(name))


@v1.get("/model/unload", openapi_extra=ADMIN)
async def unload_current_model(state: State) -> None:
    """End the model that answers requests which name none."""
    await state.manager.unload()


# --- what happens -------------------------------------------------------------------------------------------------


@v1.get("/model/events", openapi_extra=API, response_model=ModelEventFrame, responses=STREAMED)
async def model_events(request: Request, state: State) -> Response:
    """The states of the models that the caller may use, then every change of a model's state and every step of a load.

    The stream goes on until its client leaves or the server ends.
    """
    changes = state.manager.events.follow()
    states = {name: state.manager.status(folder) for name, folder in visible_folders(request, state).items()}
    now = [ModelEvent(name, status.state, reason=status.reason) for name, status in states.items()]

    async def stop() -> None:
        changes.close()

    ping = state.settings.network.sse_ping_interval
    return EventStream(_frames(now, changes), wire=CORE, ping=ping, cleanup=stop)


async def _frames(now: list[ModelEvent], changes: Follower) -> AsyncIterator[str]:
    for event in now:
        yield ModelEventFrame.of(event).model_dump_json()
    async for event in changes:
        yield ModelEventFrame.of(event).model_dump_json()
