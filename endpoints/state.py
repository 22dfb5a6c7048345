"""What the routes of one application share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final
from weakref import WeakKeyDictionary, WeakSet

from fastapi import Depends, FastAPI, Request
from loguru import logger

from backends.client import EngineClient
from backends.embeddings.manager import EmbeddingManager
from backends.manager import ModelManager, Wanted
from backends.messages import ModelInfo
from backends.residents import Lease
from common.auth import KeyStore
from common.config_models import LoadSettings, Settings
from common.downloader import Downloads, download_folders
from common.errors import InvalidRequest, ModelNotFound, ModelNotLoaded, RequestCancelled, ServerError
from common.fetch import ImageFetcher
from common.metrics import Metrics
from common.names import untagged
from common.parsing.detection import AnswerSyntax, check_settings, detect
from common.sampling import SamplerPresets
from common.sandbox import bounded
from common.tabby_config import merge_load_settings
from common.templating import ChatTemplate, find_template, list_templates
from endpoints.admission import RequestQueue
from endpoints.Kobold.utils.generations import Generations
from endpoints.OAI.utils.prompt import Later, PromptWriter
from endpoints.prompt_thread import PromptThread
from endpoints.Responses.utils.store import ResponseStore

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
    embeddings: EmbeddingManager = field(init=False)
    embedding_queue: RequestQueue = field(init=False)
    images: ImageFetcher = field(init=False)
    prompts: PromptThread = field(default_factory=PromptThread)
    downloads: Downloads = field(init=False)
    responses: ResponseStore = field(init=False)  # of the Responses API
    kobold: Generations = field(default_factory=Generations)  # which Kobold's clients can ask about and end
    stopping: bool = False  # the server ends: what it has begun is finished, and nothing else begun
    _writers: WeakKeyDictionary[EngineClient, PromptWriter | None] = field(default_factory=WeakKeyDictionary)
    _given_tools: WeakSet[EngineClient] = field(default_factory=WeakSet)  # by a request, in a form that is unknown

    def __post_init__(self) -> None:
        self.queue = RequestQueue(self.settings.network, self.metrics)
        self.embedding_queue = RequestQueue(self.settings.network, self.metrics)
        self.embeddings = EmbeddingManager(
            self.settings.embeddings,
            load_on_demand=self.settings.model.inline_model_loading,
            engine_timeout=self.settings.network.engine_timeout,
        )
        self.embeddings.on_restart = self.metrics.count_restart
        self.images = ImageFetcher.of(self.settings.network)
        self.responses = ResponseStore(self.settings.network.response_store_mb)
        self.downloads = Downloads(download_folders(self.settings))

    def refuse_when_stopping(self) -> None:
        """Raise `RequestCancelled` where nothing new is begun any more."""
        if self.stopping:
            raise RequestCancelled("The server is shutting down. Send the request again once it is back.")

    async def serving(self, request: Request, name: str | None, *, keep_alive: float | None = None) -> EngineClient:
        """The model that answers a request, which stays loaded until the request has ended. It may have to be loaded.

        Args:
            name: that the request gives.
            keep_alive: seconds for which the model stays loaded after this and later requests, negative for ever; None:
                as the settings or an earlier request say.

        Raises:
            ModelNotFound: there is no model of that name, and model.inline_model_loading is set.
            ModelNotLoaded: no model is named, and none is there.
            ServerError: the model could not be loaded.
        """
        self.refuse_when_stopping()
        try:
            lease = await self.manager.acquire(self._wanted(name), keep_alive=keep_alive)
        except InvalidRequest as error:  # over what the model is loaded with, of which the request says its name only
            error.param = "model"
            raise
        leases_of(request).append(lease)
        return lease.client

    def _wanted(self, name: str | None) -> Wanted | None:
        """What a request names; None: it is left to the server."""
        selection = self.settings.model
        current, inline = self.manager.current, selection.inline_model_loading
        name = untagged(name or "")  # clients that know models from Ollama's API may speak OpenAI's
        if not name or selection.is_dummy(name):
            if not inline or current is None or current.state != "failed":
                return None
            directory = current.directory
        else:
            known = self.manager.known(name)
            if known is None and not inline:
                return None
            directory = known.directory if known is not None else self._model_named(name)
        return Wanted(directory, partial(self._load_settings, directory) if inline else None)

    def _model_named(self, name: str) -> Path:
        try:
            return self.manager.resolve(name, "model")
        except (InvalidRequest, ModelNotFound) as error:
            raise ModelNotFound(
                f"There is no model {name!r}; /v1/models lists those that there are.", param="model"
            ) from error

    async def _load_settings(self, directory: Path) -> LoadSettings:
        settings = merge_load_settings(self.settings, model_directory=directory, request={})
        await check_load(directory, settings, self.presets)
        return settings

    def ready_model(self) -> str | None:
        """Name of the model that answers requests which name none, or will when it is awake again.

        None: there is none, and any that a request names is loaded for it.

        Raises:
            ModelNotLoaded: requests are not answered at this moment, and why.
        """
        if self.manager.sleeping is not None:
            self.refuse_when_stopping()
            return self.manager.sleeping.name
        if self.settings.model.inline_model_loading and self.manager.state in ("empty", "failed"):
            self.refuse_when_stopping()
            return None
        return self.require_ready().name

    def shown_model(self, name: str | None = None) -> EngineClient:
        """A model to say something of, which may be asleep.

        Args:
            name: None: that which answers requests that name none.

        Raises:
            ModelNotFound: it is neither up nor asleep.
            ModelNotLoaded: no model is named, and none is there.
        """
        client = (self.manager.sleeping or self.manager.require()) if name is None else self.manager.known(name)
        if client is None:
            raise ModelNotFound(f"The model {name!r} is not loaded.", param="name")
        return client

    def require_ready(self, name: str | None = None) -> EngineClient:
        """A loaded model, whose engine answers at this moment; else `ModelNotLoaded` with the reason.

        Args:
            name: that a request gives; for any but that of a loaded model it is the one that answers requests without.
        """
        self.refuse_when_stopping()
        client = (self.manager.known(name) if name else None) or self.manager.require()
        if client.state == "closed":
            raise ModelNotLoaded(f"The model {client.name} sleeps. A request for an answer loads it again.")
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


def leases_of(request: Request) -> list[Lease]:
    """What a request holds of models; its route lets go of it when the response has been sent."""
    leases: list[Lease] | None = getattr(request.state, "leases", None)
    if leases is None:
        leases = request.state.leases = []
    return leases


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
