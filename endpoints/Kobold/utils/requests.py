"""Bodies of Kobold's routes -> what the engine is asked for."""

from __future__ import annotations

from typing import Final

from loguru import logger

from backends.client import EngineClient
from common.errors import MAX_TOKEN_CHARACTERS, InvalidRequest, Unsupported
from common.generation import GenerationRequest
from endpoints.Kobold.types.generate import KoboldGenerateRequest
from endpoints.OAI.utils.requests import asked_in_completion
from endpoints.state import ServerState, loaded_info

# Tokens that no text stands for: BOS, and a space that some tokenizers put before the first word.
_ADDED: Final = 2
# What completions take and Kobold's answers have no place for.
_LEFT_OUT: Final = {"best_of": None, "echo": False, "prompt_logprobs": None}


async def asked_of_kobold(
    body: KoboldGenerateRequest, state: ServerState, client: EngineClient, *, stream: bool
) -> tuple[KoboldGenerateRequest, list[GenerationRequest]]:
    """The body with the presets in force, and a request for each answer.

    Raises:
        InvalidRequest: it cannot be served as it is.
    """
    if body.images:
        raise Unsupported("images has to be empty: only chat completions take images.", param="images")
    fields, generations = await asked_in_completion(await _fitted(body, client), state, client)
    if stream and len(generations) > 1:
        raise InvalidRequest("n larger than 1 cannot be streamed: the events do not say whose they are.", param="n")
    return fields, generations


async def _fitted(body: KoboldGenerateRequest, client: EngineClient) -> KoboldGenerateRequest:
    """The request with its memory in front of the prompt, and both cut to the length that the client wants.

    Nothing is cut where the request names no `max_context_length`.
    """
    [prompt] = body.prompt
    assert isinstance(prompt, str)
    text = body.memory + prompt
    whole = body.model_copy(update=_LEFT_OUT | {"prompt": [text]})
    if body.max_context_length is None:
        return whole
    limit = min(body.max_context_length, loaded_info(client).max_seq_len)
    half = limit // 2
    room = limit - (min(body.max_tokens, half) if body.max_tokens > 0 else half)
    if len(text.encode("utf-8", "replace")) + _ADDED <= room:  # no token is less than a byte
        return whole
    bos = await client.encode("", add_bos=body.add_bos_token)
    memory = await client.encode(_end(body.memory, room), add_bos=False)
    tokens = await client.encode(_end(prompt, room), add_bos=False)
    cut = len(bos) + len(memory) + len(tokens) - room
    if cut <= 0:
        return whole
    memory = memory[max(0, len(memory) - room // 2) :]
    tokens = tokens[max(0, len(bos) + len(memory) + len(tokens) - room) :]
    logger.info("The prompt was cut to {} tokens, as max_context_length and max_length say", room)
    return whole.model_copy(update={"prompt": [[*bos, *memory, *tokens]]})


def _end(text: str, tokens: int) -> str:
    """As much of a text as so many tokens may hold."""
    return text[-tokens * MAX_TOKEN_CHARACTERS :]
