"""What the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from weakref import WeakKeyDictionary, WeakSet

from fastapi import Depends, Request
from loguru import logger

from backends.client import EngineClient
from backends.manager import ModelManager
from backends.messages import ModelInfo
from common.auth import KeyStore
from common.config_models import LoadSettings, Settings
from common.errors import InvalidRequest, ModelNotLoaded, ServerError
from common.metrics import Metrics
from common.parsing.detection import AnswerSyntax, check_settings, detect
from common.sampling import SamplerPresets
from common.templating import ChatTemplate, find_template, list_templates
from endpoints.OAI.utils.prompt import PromptWriter

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
    _writers: WeakKeyDictionary[EngineClient, PromptWriter | None] = field(default_factory=WeakKeyDictionary)
    _given_tools: WeakSet[EngineClient] = field(default_factory=WeakSet)  # by a request, in a form that is unknown

    def require_ready(self) -> EngineClient:
        """The loaded model, whose engine answers at this moment; else `ModelNotLoaded` with the reason."""
        client = self.manager.require()
        if client.state != "ready":
            reason = f" ({client.failure})" if client.failure else ""
            raise ModelNotLoaded(f"The engine of {client.name} is {client.state}{reason}.")
        return client

    def prepare(self, client: EngineClient) -> None:
        """Find out, and say in the log, how a model that has just been loaded is talked with."""
        try:
            self._writer_of(client)
        except ServerError as error:  # its template has been changed since the load was checked
            logger.warning("{} cannot chat: {}", client.name, error.message)

    def template_of(self, client: EngineClient) -> ChatTemplate | None:
        """The chat template in force for a model; read from disk once per load. Raises `InvalidRequest`."""
        writer = self._writer_of(client)
        return writer.template if writer is not None else None

    def syntax_of(self, client: EngineClient) -> AnswerSyntax | None:
        """How a model writes its answers; None for one that cannot chat. Raises `InvalidRequest`."""
        writer = self._writer_of(client)
        return writer.syntax if writer is not None else None

    def warnings_of(self, client: EngineClient) -> list[str]:
        """What there is to say about a loaded model's settings."""
        given = client in self._given_tools and self._has_unknown_tool_format(client)
        return [*loaded_info(client).warnings, *([_TOOLS_UNKNOWN] if given else [])]

    def warn_tools_unknown(self, client: EngineClient) -> None:
        """To be called for a request with tools: warns, once for a model, where nothing is known of its calls."""
        if client not in self._given_tools and self._has_unknown_tool_format(client):
            self._given_tools.add(client)
            logger.warning("{}: {}", client.name, _TOOLS_UNKNOWN)

    def _has_unknown_tool_format(self, client: EngineClient) -> bool:
        syntax = self.syntax_of(client)
        return syntax is not None and syntax.tool_format.certainty == "unknown"

    def switch_template(self, client: EngineClient, name: str) -> None:
        """Use another template until the model is loaded anew. Requests in flight have their prompts already.

        Args:
            name: as for `prompt_template`, or of the template that the model was loaded with.

        Raises:
            InvalidRequest: there is no such template, or it does not compile.
        """
        loaded = _loaded_template(client)
        is_loaded = loaded is not None and loaded.name == name
        self._writers[client] = _writer(client, loaded if is_loaded else find_template(client.directory, name))

    def unload_template(self, client: EngineClient) -> None:
        """Use none, so that the model cannot chat, until another is switched to or the model is loaded anew."""
        self._writers[client] = None

    def template_names(self) -> list[str]:
        """What `switch_template()` takes, whatever the model, and the template that the loaded model came with."""
        client = self.manager.current
        loaded = _loaded_template(client) if client is not None else None
        return sorted({*list_templates(), *([loaded.name] if loaded is not None else [])})

    def prompt_writer(self, client: EngineClient) -> PromptWriter:
        """What writes the prompts of a loaded model's chats. Raises `InvalidRequest` where it cannot chat."""
        writer = self._writer_of(client)
        if writer is None:
            raise InvalidRequest(
                f"The model {client.directory.name} has no chat template, so it cannot chat. Use /v1/completions, give "
                "it one of templates/ with /v1/template/switch or prompt_template, or put a chat_template.jinja into "
                "its folder."
            )
        return writer

    def _writer_of(self, client: EngineClient) -> PromptWriter | None:
        # One for all requests: it knows the turns before the one that it writes.
        if client not in self._writers:
            self._writers[client] = _writer(client, _loaded_template(client))
        return self._writers[client]


def check_load(directory: Path, settings: LoadSettings, presets: SamplerPresets) -> None:
    """Read the files that a load asks for by name, before anything is touched.

    Raises:
        ServerError: there is no such chat template, tool format or sampler preset, or it is broken.
    """
    check_settings(settings.model)
    find_template(directory, settings.model.prompt_template)
    presets.read_for_model(settings.model.sampler_preset)


def _loaded_template(client: EngineClient) -> ChatTemplate | None:
    return find_template(client.directory, client.settings.model.prompt_template)


def _writer(client: EngineClient, template: ChatTemplate | None) -> PromptWriter | None:
    if template is None:
        return None
    model, info = client.settings.model, loaded_info(client)
    control_tokens = info.control_tokens
    syntax = detect(template, [token.text for token in control_tokens], model)
    for what, found in (("Tool calls", syntax.tool_format), ("Thoughts", syntax.thoughts)):
        logger.info("{} of {}: {} ({})", what, client.name, found.value or "no form known", found.source)
    has_checkpoints = info.checkpoints is not None
    return PromptWriter(template, model, control_tokens, syntax=syntax, has_checkpoints=has_checkpoints)


def attach_state(app_state: object, state: ServerState) -> None:
    setattr(app_state, _ATTRIBUTE, state)


def state_of(request: Request) -> ServerState:
    state = getattr(request.app.state, _ATTRIBUTE)
    assert isinstance(state, ServerState)
    return state


State = Annotated[ServerState, Depends(state_of)]


def loaded_info(client: EngineClient) -> ModelInfo:
    """What a client from `ModelManager.require()` has loaded."""
    assert client.info is not None
    return client.info
