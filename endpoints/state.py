"""What the routes of one application share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from weakref import WeakKeyDictionary, WeakSet

from fastapi import Depends, FastAPI, Request
from loguru import logger

from backends.client import EngineClient
from backends.manager import ModelManager
from backends.messages import ModelInfo
from common.auth import KeyStore
from common.config_models import LoadSettings, Settings
from common.errors import InvalidRequest, ModelNotLoaded, RequestCancelled, ServerError
from common.metrics import Metrics
from common.parsing.detection import AnswerSyntax, check_settings, detect
from common.sampling import SamplerPresets
from common.sandbox import bounded
from common.templating import ChatTemplate, find_template, list_templates
from endpoints.admission import RequestQueue
from endpoints.OAI.utils.prompt import Later, PromptWriter
from endpoints.prompt_thread import PromptThread

_ATTRIBUTE: Final = "server"
_TOOLS_UNKNOWN: Final = (
    "A request has given the model tools, but neither its chat template nor its tokenizer shows in which form it calls "
    "them. Calls of every known form are looked for; set tool_format to the model's own."
)


@dataclass
class ServerState:
    settings: Settings
    manager: ModelManager
    keys: KeyStore | None  # None: everybody is administrator
    presets: SamplerPresets
    metrics: Metrics = field(default_factory=Metrics)
    queue: RequestQueue = field(init=False)
    prompts: PromptThread = field(default_factory=PromptThread)
    stopping: bool = False  # the server ends: what it has begun is finished, and nothing else begun
    _writers: WeakKeyDictionary[EngineClient, PromptWriter | None] = field(default_factory=WeakKeyDictionary)
    _given_tools: WeakSet[EngineClient] = field(default_factory=WeakSet)  # by a request, in a form that is unknown

    def __post_init__(self) -> None:
        self.queue = RequestQueue(self.settings.network, self.metrics)

    def refuse_when_stopping(self) -> None:
        """Raise `RequestCancelled` where nothing new is begun any more."""
        if self.stopping:
            raise RequestCancelled("The server is shutting down. Send the request again once it is back.")

    async def serving(self, request: Request, name: str | None, *, keep_alive: float | None = None) -> EngineClient:
        """The model that answers a request, which stays loaded until the request has ended.

        Raises:
            ModelNotLoaded: there is none.
        """
        return self.manager.require()

    def require_ready(self) -> EngineClient:
        """The loaded model, whose engine answers at this moment; else `ModelNotLoaded` with the reason."""
        self.refuse_when_stopping()
        client = self.manager.require()
        if client.state != "ready":
            what = "has failed" if client.state == "failed" else f"is {client.state}"
            raise ModelNotLoaded(f"The engine of {client.name} {what}: {client.failure}")
        return client

    async def prepare(self, client: EngineClient) -> None:
        """Find out, and say in the log, how a model that has just been loaded is talked with."""
        try:
            await self._writer_of(client)
        except ServerError as error:  # its template has been changed since the load was checked
            logger.warning("{} cannot chat: {}", client.name, error.message)

    async def template_of(self, client: EngineClient) -> ChatTemplate | None:
        """The chat template in force for a model; read from disk once per load. Raises `InvalidRequest`."""
        writer = await self._writer_of(client)
        return writer.template if writer is not None else None

    async def syntax_of(self, client: EngineClient) -> AnswerSyntax | None:
        """How a model writes its answers; None for one that cannot chat. Raises `InvalidRequest`."""
        writer = await self._writer_of(client)
        return writer.syntax if writer is not None else None

    async def warnings_of(self, client: EngineClient) -> list[str]:
        """What there is to say about a loaded model's settings."""
        given = client in self._given_tools and await self._has_unknown_tool_format(client)
        return [*loaded_info(client).warnings, *([_TOOLS_UNKNOWN] if given else [])]

    async def warn_tools_unknown(self, client: EngineClient) -> None:
        """To be called for a request with tools: warns, once for a model, where nothing is known of its calls."""
        if client not in self._given_tools and await self._has_unknown_tool_format(client):
            self._given_tools.add(client)
            logger.warning("{}: {}", client.name, _TOOLS_UNKNOWN)

    async def _has_unknown_tool_format(self, client: EngineClient) -> bool:
        syntax = await self.syntax_of(client)
        return syntax is not None and syntax.tool_format.certainty == "unknown"

    async def switch_template(self, client: EngineClient, name: str) -> None:
        """Use another template until the model is loaded anew. Requests in flight have their prompts already.

        Args:
            name: as for `prompt_template`, or of the template that the model was loaded with.

        Raises:
            InvalidRequest: there is no such template, or it does not compile.
        """

        def write() -> PromptWriter | None:
            loaded = _loaded_template(client)
            is_loaded = loaded is not None and loaded.name == name
            return _writer(client, loaded if is_loaded else find_template(client.directory, name), self.prompts.later)

        self._writers[client] = await self.prompts.run(write)

    def unload_template(self, client: EngineClient) -> None:
        """Use none, so that the model cannot chat, until another is switched to or the model is loaded anew."""
        self._writers[client] = None

    async def template_names(self) -> list[str]:
        """What `switch_template()` takes, whatever the model, and the template that the loaded model came with."""
        client = self.manager.current
        loaded = await asyncio.to_thread(_loaded_template, client) if client is not None else None
        return sorted({*list_templates(), *([loaded.name] if loaded is not None else [])})

    async def prompt_writer(self, client: EngineClient) -> PromptWriter:
        """What writes the prompts of a loaded model's chats, in the thread of `prompts`.

        Raises:
            InvalidRequest: the model cannot chat.
        """
        writer = await self._writer_of(client)
        if writer is None:
            raise InvalidRequest(
                f"The model {client.directory.name} has no chat template, so it cannot chat. Use /v1/completions, give "
                "it one of templates/ with /v1/template/switch or prompt_template, or put a chat_template.jinja into "
                "its folder."
            )
        return writer

    async def _writer_of(self, client: EngineClient) -> PromptWriter | None:
        # One for all requests: it knows the turns before the one that it writes.
        if client not in self._writers:
            writer = await self.prompts.run(lambda: _writer(client, _loaded_template(client), self.prompts.later))
            self._writers.setdefault(client, writer)  # others may have had the same idea, or another template
        return self._writers[client]


async def check_load(directory: Path, settings: LoadSettings, presets: SamplerPresets) -> None:
    """Read the files that a load asks for by name, before anything is touched.

    Raises:
        ServerError: there is no such chat template, tool format or sampler preset, or it is broken.
    """
    check_settings(settings.model)
    await asyncio.to_thread(find_template, directory, settings.model.prompt_template)
    presets.read_for_model(settings.model.sampler_preset)


def _loaded_template(client: EngineClient) -> ChatTemplate | None:
    return find_template(client.directory, client.settings.model.prompt_template)


def _writer(client: EngineClient, template: ChatTemplate | None, later: Later) -> PromptWriter | None:
    if template is None:
        return None
    model, info = client.settings.model, loaded_info(client)
    control_tokens = info.control_tokens
    with bounded():
        syntax = detect(template, [token.text for token in control_tokens], model)
    for what, found in (("Tool calls", syntax.tool_format), ("Thoughts", syntax.thoughts)):
        logger.info("{} of {}: {} ({})", what, client.name, found.value or "no form known", found.source)
    return PromptWriter(
        template,
        model,
        control_tokens,
        syntax=syntax,
        has_checkpoints=info.checkpoints is not None,
        max_seq_len=info.max_seq_len,
        later=later,
    )


def attach_state(app_state: object, state: ServerState) -> None:
    setattr(app_state, _ATTRIBUTE, state)


def state_of(request: Request) -> ServerState:
    return application_state(request.app)


def application_state(app: FastAPI) -> ServerState:
    state = getattr(app.state, _ATTRIBUTE)
    assert isinstance(state, ServerState)
    return state


async def _state_of(request: Request) -> ServerState:
    return state_of(request)  # FastAPI would call that in another thread


State = Annotated[ServerState, Depends(_state_of)]


def loaded_info(client: EngineClient) -> ModelInfo:
    """What a client from `ModelManager.require()` has loaded."""
    assert client.info is not None
    return client.info
