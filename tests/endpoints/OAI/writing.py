"""Prompt writers for templates, as a loaded model has one, and answers to their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from backends.messages import ControlToken
from common.config_models import ModelConfig
from common.generation import Event, Finish, TextDelta, Usage
from common.parsing.detection import detect
from common.templating import ChatTemplate
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.common import Envelope
from endpoints.OAI.utils.chat import ChatCodec, ChatTurn
from endpoints.OAI.utils.prompt import PromptWriter
from endpoints.streaming import Queued


def writer(
    template: ChatTemplate | str,
    tokens: Sequence[ControlToken] = (),
    *,
    has_checkpoints: bool = False,
    **settings: object,
) -> PromptWriter:
    """
    Args:
        template: or its source.
        tokens: of the tokenizer.
        has_checkpoints: of the model.
        settings: of the model.
    """
    if isinstance(template, str):
        template = ChatTemplate("t", template)
    model = ModelConfig.model_validate(settings)
    syntax = detect(template, [token.text for token in tokens], model)
    return PromptWriter(template, model, tokens, syntax=syntax, has_checkpoints=has_checkpoints)


def turn_of(prompts: PromptWriter, **fields: Any) -> ChatTurn:
    """The turn of a request with these fields."""
    return ChatTurn(ChatCompletionRequest.model_validate(fields), prompts)


def answered(turn: ChatTurn, raw: str, token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """The message that a client gets when the model writes something."""

    async def happening() -> AsyncIterator[tuple[int, Event | Queued]]:
        yield 0, Queued(1)
        yield 0, TextDelta(raw, list(token_ids))
        usage = Usage(prompt_tokens=1, completion_tokens=len(token_ids))
        yield 0, Finish(reason="stop", eos_reason="stop_token", usage=usage)

    codec = ChatCodec(Envelope(id="id", created=1, model="m", system_fingerprint="fp"), turn)
    return asyncio.run(codec.collect(happening())).choices[0].message.model_dump()
