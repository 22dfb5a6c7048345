"""TabbyAPI's own routes beside those of models: chat templates, sampler overrides, and how the server is."""

from __future__ import annotations

from fastapi import APIRouter, Request

from common.errors import InvalidRequest
from common.version import VERSION
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
from endpoints.state import State, loaded_info

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
    """Requests are answered, though a model may have to be loaded for them; else 503 with the reason."""
    return Readiness(model=state.ready_model())


@router.get("/.well-known/serviceinfo", openapi_extra=OPEN)
async def service_info(state: State) -> ServiceInfo:
    api = {"openai": ServiceApi(name="OpenAI API", relative_url="/v1")}
    if "kobold" in state.settings.network.api_servers:
        api["koboldai"] = ServiceApi(name="KoboldAI API", relative_url="/api")
    return ServiceInfo(software=Service(name="Waypoint"), api=api)


@router.get("/version", openapi_extra=OPEN)
async def version() -> Version:
    """Which version answers."""
    return Version(version=VERSION)


@router.get("/props", openapi_extra=API)
async def props(state: State) -> Props:
    """What front ends made for llama.cpp's server ask before they begin."""
    client = state.shown_model()
    return Props.of(loaded_info(client), await state.template_of(client))


@v1.get("/auth/permission", openapi_extra=API)
async def auth_permission(request: Request) -> PermissionAnswer:
    return PermissionAnswer(permission=request.state.permission)


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
