"""TabbyAPI's own routes: models, chat templates, sampler overrides, and how the server is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi import APIRouter, Request, Response

from backends.manager import ModelManager
from backends.messages import LoadProgress
from common.config_models import LoadSettings
from common.errors import InvalidRequest, ModelNotFound
from common.tabby_config import merge_load_settings
from common.version import VERSION
from endpoints.core.types.model import ModelLoadRequest
from endpoints.core.types.model_card import LoadProgressEvent, ModelCard, ModelList, model_parameters
from endpoints.core.types.props import Props
from endpoints.core.types.server import (
    Health,
    PermissionAnswer,
    Readiness,
    SamplerOverrides,
    SamplerOverrideSwitch,
    Service,
    ServiceApi,
    ServiceInfo,
    Version,
)
from endpoints.core.types.template import TemplateList, TemplateSwitch
from endpoints.routing import ADMIN, API, OPEN, CoreRoute
from endpoints.state import ServerState, State, check_load, loaded_info
from endpoints.streaming import STREAMED, EventStream, start_early
from endpoints.wire import CORE

router = APIRouter(route_class=CoreRoute)
v1 = APIRouter(route_class=CoreRoute)  # below /v1


# --- the server ---------------------------------------------------------------------------------------------------


@router.get("/health", openapi_extra=OPEN)
@router.head("/health", openapi_extra=OPEN, include_in_schema=False)
@router.get("/ping", openapi_extra=OPEN)
async def health() -> Health:
    """The server answers. Whether a model does says /ready."""
    return Health()


@router.get("/ready", openapi_extra=OPEN)
@router.head("/ready", openapi_extra=OPEN, include_in_schema=False)
async def ready(state: State) -> Readiness:
    """A model answers; else 503 with the reason."""
    return Readiness(model=state.require_ready().name)


@router.get("/.well-known/serviceinfo", openapi_extra=OPEN)
async def service_info() -> ServiceInfo:
    return ServiceInfo(
        software=Service(name="Waypoint"), api={"openai": ServiceApi(name="OpenAI API", relative_url="/v1")}
    )


@router.get("/version", openapi_extra=OPEN)
async def version() -> Version:
    """Which version answers."""
    return Version(version=VERSION)


@router.get("/props", openapi_extra=API)
async def props(state: State) -> Props:
    """What front ends made for llama.cpp's server ask before they begin."""
    client = state.manager.require()
    return Props.of(loaded_info(client), await state.template_of(client))


@v1.get("/auth/permission", openapi_extra=API)
async def auth_permission(request: Request) -> PermissionAnswer:
    return PermissionAnswer(permission=request.state.permission)


# --- models -------------------------------------------------------------------------------------------------------


@v1.get("/models", openapi_extra=API)
@v1.get("/model/list", openapi_extra=API)
async def list_models(request: Request, state: State) -> ModelList:
    """The loaded model first; for an administrator then every other model that can be loaded."""
    visible = _visible_models(request, state)
    return ModelList(data=[ModelCard(id=name, created=created) for name, created in visible.items()])


@v1.get("/models/{model_id:path}", openapi_extra=API)
async def retrieve_model(model_id: str, request: Request, state: State) -> ModelCard:
    created = _visible_models(request, state).get(model_id)
    if created is None:
        raise ModelNotFound(f"There is no model {model_id!r}; /v1/models lists those that you can use.", param="model")
    return ModelCard(id=model_id, created=created)


@v1.get("/model", openapi_extra=API)
async def current_model(state: State) -> ModelCard:
    """The loaded model and how it is set up."""
    client = state.manager.require()
    created = _created(client.directory)
    parameters = model_parameters(
        client,
        loaded_info(client),
        await state.template_of(client),
        await state.syntax_of(client),
        await state.warnings_of(client),
        created,
    )
    return ModelCard(id=client.name, created=created, parameters=parameters)


@v1.post("/model/load", openapi_extra=ADMIN, response_model=LoadProgressEvent, responses=STREAMED)
async def load_model(body: ModelLoadRequest, state: State) -> Response:
    """Load a model in place of the loaded one, which keeps answering until the new one has been checked.

    The stream tells the progress. Closing the connection does not stop the load.
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
@v1.get("/model/unload", openapi_extra=ADMIN)
async def unload_model(state: State) -> None:
    """End the loaded model, and the requests that it works on."""
    state.manager.require()
    await state.manager.unload()


def _visible_models(request: Request, state: ServerState) -> dict[str, int]:
    """Names and creation times of the models that the caller may know of, the loaded one first."""
    manager = state.manager
    visible: dict[str, int] = {}
    if manager.current is not None:
        visible[manager.current.name] = _created(manager.current.directory)
    if request.state.permission == "admin":
        for name in manager.list_models():
            visible.setdefault(name, _created(manager.model_dir / name))
    return visible


def _created(directory: Path) -> int:
    try:
        return int((directory / "config.json").stat().st_mtime)
    except OSError:  # the folder may have gone since; the model in memory has not
        return 0


# --- chat templates -----------------------------------------------------------------------------------------------


@v1.get("/templates", openapi_extra=API)
@v1.get("/template/list", openapi_extra=API)
async def list_templates(request: Request, state: State) -> TemplateList:
    """For an administrator the names that can be switched to, else the template in force."""
    if request.state.permission == "admin":
        return TemplateList(data=await state.template_names())
    client = state.manager.current
    template = await state.template_of(client) if client is not None else None
    return TemplateList(data=[template.name] if template is not None else [])


@v1.post("/template/switch", openapi_extra=ADMIN)
async def switch_template(body: TemplateSwitch, state: State) -> None:
    """Give the loaded model another chat template, without loading it again."""
    client = state.manager.require()
    try:
        await state.switch_template(client, body.prompt_template_name)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="prompt_template_name") from error


@v1.post("/template/unload", openapi_extra=ADMIN)
async def unload_template(state: State) -> None:
    """Take the loaded model's chat template away; it cannot chat until another is switched to."""
    state.unload_template(state.manager.require())


# --- sampler overrides --------------------------------------------------------------------------------------------


@v1.get("/sampling/overrides", openapi_extra=API)
@v1.get("/sampling/override/list", openapi_extra=API)
async def list_overrides(request: Request, state: State) -> SamplerOverrides:
    """The preset in force for every request, and the loaded model's, whose parameters win over it."""
    client = state.manager.current
    model_preset = client.settings.model.sampler_preset if client is not None else None
    return SamplerOverrides(
        selected_preset=state.presets.selected,
        overrides=state.presets.overrides,
        presets=state.presets.names() if request.state.permission == "admin" else [],
        model_preset=model_preset,
        model_overrides=state.presets.of_model(model_preset),
    )


@v1.post("/sampling/override/switch", openapi_extra=ADMIN)
async def switch_overrides(body: SamplerOverrideSwitch, state: State) -> None:
    """Put a preset in force, or overrides given directly."""
    if body.preset:
        state.presets.select(body.preset)
    elif body.overrides:
        state.presets.replace(body.overrides)
    else:
        raise InvalidRequest("Give the name of a preset, or overrides.", param="preset")


@v1.post("/sampling/override/unload", openapi_extra=ADMIN)
async def clear_overrides(state: State) -> None:
    state.presets.clear()
