"""Routes of LoRA adapters: which there are, which are applied, and changing that."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request

from backends.client import EngineClient
from backends.messages import Lora
from common.errors import InvalidRequest
from common.model_folder import ADAPTER_CONFIG, created, list_adapters
from endpoints.core.types.lora import LoraCard, LoraList, LoraLoadAnswer, LoraLoadRequest
from endpoints.routing import ADMIN, API, CoreRoute
from endpoints.state import ServerState, State, loaded_info

v1 = APIRouter(route_class=CoreRoute)  # below /v1


@v1.get("/loras", openapi_extra=API)
@v1.get("/lora/list", openapi_extra=API)
async def list_loras(request: Request, state: State) -> LoraList:
    """As `/v1/lora`; for an administrator then every other adapter in lora_dir."""
    client = state.manager.current
    cards = {card.id: card for card in (_cards(state, client) if client is not None else ())}
    if request.state.permission == "admin":
        for name in list_adapters(_folder(state)):
            cards.setdefault(name, _card(state, name))
    return LoraList(data=list(cards.values()))


@v1.get("/lora", openapi_extra=API)
async def current_loras(state: State) -> LoraList:
    """The adapters that the loaded model computes with; then those that could not be applied again after a crash."""
    return LoraList(data=_cards(state, state.manager.require()))


@v1.post("/lora/load", openapi_extra=ADMIN)
async def load_loras(body: LoraLoadRequest, request: Request, state: State) -> LoraLoadAnswer:
    """Apply adapters to the loaded model, for all its requests from then on.

    Those that cannot be applied are told with the reason, and the others applied; where none can be, nothing changes.
    Requests in flight are waited for, and new ones wait. Closing the connection does not stop the change.
    """
    names = [lora.name for lora in body.loras]
    if len(set(names)) < len(names):
        raise InvalidRequest("loras names an adapter twice. Give each once, with its scaling.", param="loras")
    client = await state.serving(request, None)
    asked = [Lora(lora.name, lora.scaling) for lora in body.loras]
    problems = await client.check_loras(asked)
    errors = {lora.name: problem.message for lora, problem in zip(asked, problems, strict=True) if problem is not None}
    fitting = [lora for lora in asked if lora.name not in errors]
    if not fitting:
        param = next(problem.param for problem in problems if problem is not None)
        raise InvalidRequest("\n".join(errors.values()), param=param)
    await client.add_loras(fitting, skip_queue=body.skip_queue)
    return LoraLoadAnswer(success=[lora.name for lora in fitting], failure=list(errors), errors=errors)


@v1.post("/lora/unload", openapi_extra=ADMIN)
async def unload_loras(request: Request, state: State) -> None:
    """Take all adapters off the loaded model, once the requests in flight have ended."""
    client = await state.serving(request, None)
    await client.remove_loras()


def _folder(state: ServerState) -> Path:
    return Path(state.settings.lora.lora_dir)


def _cards(state: ServerState, client: EngineClient) -> list[LoraCard]:
    applied = [_card(state, lora.name, scaling=lora.scaling) for lora in loaded_info(client).loras]
    return applied + [_card(state, name, error=reason) for name, reason in client.left_out.items()]


def _card(state: ServerState, name: str, *, scaling: float | None = None, error: str | None = None) -> LoraCard:
    return LoraCard(id=name, created=created(_folder(state) / name / ADAPTER_CONFIG), scaling=scaling, error=error)
