"""What the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final
from weakref import WeakKeyDictionary

from fastapi import Depends, Request

from backends.client import EngineClient
from backends.manager import ModelManager
from backends.messages import ModelInfo
from common.auth import KeyStore
from common.config_models import Settings
from common.errors import InvalidRequest
from common.sampling import SamplerPresets
from common.templating import ChatTemplate, find_template
from endpoints.OAI.utils.prompt import PromptWriter

_ATTRIBUTE: Final = "server"


@dataclass
class ServerState:
    settings: Settings
    manager: ModelManager
    keys: KeyStore | None  # None: everybody is administrator
    presets: SamplerPresets
    _templates: WeakKeyDictionary[EngineClient, ChatTemplate | None] = field(default_factory=WeakKeyDictionary)

    def template_of(self, client: EngineClient) -> ChatTemplate | None:
        """The chat template of a model; read from disk once per load. Raises `InvalidRequest`."""
        if client not in self._templates:
            self._templates[client] = find_template(client.directory, client.settings.model.prompt_template)
        return self._templates[client]

    def prompt_writer(self, client: EngineClient) -> PromptWriter:
        """What writes the prompts of a loaded model's chats. Raises `InvalidRequest` where it cannot chat."""
        template = self.template_of(client)
        if template is None:
            raise InvalidRequest(
                f"The model {client.directory.name} has no chat template, so it cannot chat. Use /v1/completions, put "
                "a chat_template.jinja into its folder, or load it with prompt_template set to a name in templates/."
            )
        return PromptWriter(template, client.settings.model, loaded_info(client).control_tokens)


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
