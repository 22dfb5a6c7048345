"""KoboldAI's routes, and those that KoboldCpp adds to them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from backends.client import EngineClient
from common.errors import RequestCancelled
from endpoints.admission import place_of
from endpoints.answering import Asked, respond
from endpoints.Kobold.types.generate import (
    Aborted,
    Genkey,
    KoboldGenerateRequest,
    KoboldResult,
    KoboldResults,
    KoboldToken,
    TextSoFar,
    TextsSoFar,
)
from endpoints.Kobold.types.info import (
    KOBOLDAI_VERSION,
    Detokenized,
    DetokenizeRequest,
    KoboldCppVersion,
    Named,
    Nothing,
    Number,
    Performance,
    SoftPrompt,
    SoftPrompts,
    TokenCount,
    TokenCountRequest,
)
from endpoints.Kobold.utils.codec import KoboldCodec
from endpoints.Kobold.utils.generations import Owner
from endpoints.Kobold.utils.requests import asked_of_kobold
from endpoints.Kobold.utils.wire import ERROR_RESPONSES, KoboldWire, aborted, kobold_error
from endpoints.routing import API, OPEN, AnyTypeRoute, QueuedRoute
from endpoints.state import ServerState, State, loaded_info
from endpoints.streaming import STREAMED, EventStream

_NO_KEY = Genkey()


class KoboldRoute(AnyTypeRoute):
    render_error = staticmethod(kobold_error)


class KoboldQueuedRoute(QueuedRoute, KoboldRoute):
    pass


router = APIRouter(route_class=KoboldRoute, responses=ERROR_RESPONSES)
generating = APIRouter(route_class=KoboldQueuedRoute, responses=ERROR_RESPONSES)


# --- generation ---------------------------------------------------------------------------------------------------


@generating.post("/api/v1/generate", openapi_extra=API, response_model=KoboldResults)
@generating.post("/api/latest/generate", openapi_extra=API, response_model=KoboldResults)
async def generate(
    body: KoboldGenerateRequest, request: Request, response: Response, state: State
) -> KoboldResults | EventStream:
    """The whole answer."""
    return await _answer(body, request, response, state, stream=False)


@generating.post("/api/extra/generate/stream", openapi_extra=API, response_model=KoboldToken, responses=STREAMED)
async def generate_stream(
    body: KoboldGenerateRequest, request: Request, response: Response, state: State
) -> KoboldResults | EventStream:
    """The answer in pieces, as events named message."""
    return await _answer(body, request, response, state, stream=True)


async def _answer(
    body: KoboldGenerateRequest, request: Request, response: Response, state: ServerState, *, stream: bool
) -> KoboldResults | EventStream:
    generation = state.kobold.begin(Owner.of(request), body.genkey, place_of(request))

    async def ask(client: EngineClient) -> Asked[KoboldResults]:
        fields, generations = await asked_of_kobold(body, state, client, stream=stream)
        return Asked(generations, KoboldCodec(fields, generation), fields)

    wire = KoboldWire(generation)
    try:
        return await respond(request, response, state, body.model, ask, stream=stream, wire=wire)
    except RequestCancelled:
        if not generation.aborted:
            raise
        if stream:
            return EventStream(aborted(), wire=wire, ping=0)
        return KoboldResults(results=[KoboldResult(text="", finish_reason="abort")])  # before there was any of it


@router.post("/api/extra/generate/check", openapi_extra=API)
@router.get("/api/extra/generate/check", openapi_extra=API)
async def check(request: Request, state: State, body: Genkey = _NO_KEY, genkey: str = "") -> TextsSoFar:
    """The text so far of a generation of the client's own, also for a minute after its end."""
    generation = state.kobold.last(Owner.of(request), body.genkey or genkey)
    texts = generation.texts() if generation is not None else []
    return TextsSoFar(results=[TextSoFar(text=text) for text in texts])


@router.post("/api/extra/abort", openapi_extra=API)
async def abort(request: Request, state: State, body: Genkey = _NO_KEY) -> Aborted:
    """End the generations with a key, or those without one, of the client's own. What there is of them is answered."""
    state.kobold.abort(Owner.of(request), body.genkey)
    return Aborted()


# --- the model ----------------------------------------------------------------------------------------------------


@router.get("/api/v1/model", openapi_extra=API)
@router.get("/api/latest/model", openapi_extra=API)
async def model(state: State) -> Named:
    return Named(result=f"Waypoint/{state.shown_model().name}")


@router.get("/api/v1/config/max_length", openapi_extra=API)
@router.get("/api/latest/config/max_length", openapi_extra=API)
@router.get("/api/v1/config/max_context_length", openapi_extra=API)
@router.get("/api/latest/config/max_context_length", openapi_extra=API)
@router.get("/api/extra/true_max_context_length", openapi_extra=API)
async def max_context_length(state: State) -> Number:
    """Tokens of prompt and answer together; no answer has another limit."""
    return Number(value=loaded_info(state.shown_model()).max_seq_len)


@router.post("/api/extra/tokencount", openapi_extra=API)
async def token_count(body: TokenCountRequest, request: Request, state: State) -> TokenCount:
    client = await state.serving(request, None)
    tokens = await client.encode(body.prompt, add_bos=None if body.special else False)
    return TokenCount(value=len(tokens), ids=tokens)


@router.post("/api/extra/detokenize", openapi_extra=API)
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> Detokenized:
    client = await state.serving(request, None)
    return Detokenized(result=await client.decode(body.ids))


# --- the server ---------------------------------------------------------------------------------------------------


@router.get("/api/v1/info/version", openapi_extra=OPEN)
@router.get("/api/latest/info/version", openapi_extra=OPEN)
async def koboldai_version() -> Named:
    return Named(result=KOBOLDAI_VERSION)


@router.get("/api/extra/version", openapi_extra=OPEN)
async def koboldcpp_version(state: State) -> KoboldCppVersion:
    client = state.manager.current or state.manager.sleeping
    vision = client is not None and client.info is not None and client.info.use_vision
    return KoboldCppVersion(protected=state.keys is not None, vision=vision)


@router.get("/api/extra/perf", openapi_extra=API)
async def performance(request: Request, state: State) -> Performance:
    """The client's last answer, and how busy the server is."""
    last = state.kobold.last_of(Owner.of(request))
    return Performance.of(last.usage if last is not None else None, state.queue)


@router.get("/api/v1/config/soft_prompts_list", openapi_extra=OPEN)
@router.get("/api/latest/config/soft_prompts_list", openapi_extra=OPEN)
async def soft_prompts() -> SoftPrompts:
    return SoftPrompts()


@router.get("/api/v1/config/soft_prompt", openapi_extra=OPEN)
@router.get("/api/latest/config/soft_prompt", openapi_extra=OPEN)
async def soft_prompt() -> SoftPrompt:
    return SoftPrompt()


@router.put("/api/v1/config/soft_prompt", openapi_extra=OPEN)
@router.put("/api/latest/config/soft_prompt", openapi_extra=OPEN)
async def choose_soft_prompt() -> Nothing:
    """Changes nothing: there are none to choose from."""
    return Nothing()
