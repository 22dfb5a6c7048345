"""Bodies of the generating routes -> what they ask an engine for, whether it is then generated or only asked about."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from loguru import logger

from backends.client import EngineClient
from common.errors import check_characters
from common.generation import GenerationRequest
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.completion import CompletionRequest
from endpoints.OAI.utils.chat import ChatTurn
from endpoints.OAI.utils.completion import completion_generation_requests
from endpoints.OAI.utils.constraints import checked_constraints, compiling
from endpoints.OAI.utils.images import load_images
from endpoints.state import ServerState, loaded_info

B = TypeVar("B", bound=CompletionRequest)


async def asked_in_completion(body: B, state: ServerState, client: EngineClient) -> tuple[B, list[GenerationRequest]]:
    """The body with the presets in force, and a request for each answer.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """
    body = state.presets.apply(body, client.settings.model.sampler_preset)
    info = loaded_info(client)
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_characters(len(prompt) + len(body.suffix or ""), info.max_seq_len, "prompt")
    constraints = await checked_constraints(body)
    return body, completion_generation_requests(body, constraints, info.control_tokens)


async def asked_in_chat(
    body: ChatCompletionRequest, state: ServerState, client: EngineClient
) -> tuple[ChatTurn, list[GenerationRequest]]:
    """The chat with the presets in force, and a request for each answer.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """
    body = state.presets.apply(body, client.settings.model.sampler_preset)
    given = await checked_constraints(body)
    writer = await state.prompt_writer(client)
    images = await load_images(body.messages, loaded_info(client), state.images)
    turn = await state.prompts.run(partial(ChatTurn, body, writer, images))
    constraints = await compiling(partial(turn.constraints, given, loaded_info(client).control_tokens))
    return turn, turn.requests(constraints)


async def begun_chat(
    body: ChatCompletionRequest, state: ServerState, client: EngineClient
) -> tuple[ChatTurn, list[GenerationRequest]]:
    """`asked_in_chat()` for what is then generated: what is remarkable about it is told in the log."""
    turn, generations = await asked_in_chat(body, state, client)
    if (broken := turn.prompt.broken) is not None:
        logger.info("{}", broken.describe(quote=state.settings.logging.log_prompt))
    if turn.prompt.tools.declared:
        await state.warn_tools_unknown(client)
    return turn, generations


async def counted_in_chat(body: ChatCompletionRequest, state: ServerState, client: EngineClient) -> int:
    """Tokens of the prompt of a chat. Raises `InvalidRequest` as `asked_in_chat()` does."""
    _, (asked, *_) = await asked_in_chat(body, state, client)
    assert isinstance(asked.prompt, str)
    tokens = await client.encode(asked.prompt, add_bos=asked.add_bos, literals=asked.literals, images=asked.images)
    return len(tokens)
