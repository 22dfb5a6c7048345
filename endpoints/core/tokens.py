"""Routes that turn text and conversations into tokens and back, as a completion would."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request

from backends.client import EngineClient
from common.errors import InvalidRequest
from common.generation import ImageInput, TextSpan
from endpoints.core.types.token import (
    DetokenizeRequest,
    DetokenizeResponse,
    PromptRequest,
    RenderedTemplate,
    TokenDecodeRequest,
    TokenDecodeResponse,
    TokenEncodeRequest,
    TokenEncodeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
)
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.images import load_images
from endpoints.routing import API, CoreWatchedRoute
from endpoints.state import ServerState, State, loaded_info

router = APIRouter(route_class=CoreWatchedRoute)
v1 = APIRouter(route_class=CoreWatchedRoute)  # below /v1


@v1.post("/token/encode", openapi_extra=API)
async def encode(body: TokenEncodeRequest, request: Request, state: State) -> TokenEncodeResponse:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    client = await state.serving(request, body.model)
    if body.text is None and not body.messages:
        raise InvalidRequest("text is missing: give a text, or messages.", param="text")
    tokens = await _encode(
        state,
        client,
        body,
        body.text,
        add_bos=body.add_bos_token,
        encode_special_tokens=body.encode_special_tokens,
    )
    return TokenEncodeResponse(tokens=tokens, length=len(tokens))


@v1.post("/token/decode", openapi_extra=API)
async def decode(body: TokenDecodeRequest, request: Request, state: State) -> TokenDecodeResponse:
    client = await state.serving(request, body.model)
    text = await client.decode(body.tokens, decode_special_tokens=body.decode_special_tokens)
    return TokenDecodeResponse(text=text)


@router.post("/tokenize", openapi_extra=API)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> TokenizeResponse:
    """Token ids as llama.cpp's server (`content`) and as vLLM (`prompt`, `messages`) give them."""
    client = await state.serving(request, body.model)
    text = body.prompt if body.content is None else body.content
    if text is None and not body.messages:
        raise InvalidRequest("content is missing: give content, prompt or messages.", param="content")
    add_bos = body.add_special if body.content is not None else body.add_bos_token
    # To both servers true means that the tokenizer does what it does.
    tokens = await _encode(
        state,
        client,
        body,
        text,
        add_bos=False if add_bos is False else None,
        encode_special_tokens=body.parse_special,
    )
    pieces = await client.pieces(tokens) if body.with_pieces or body.return_token_strs else []
    return TokenizeResponse(
        tokens=list(map(TokenPiece.of, tokens, pieces)) if body.with_pieces else tokens,
        count=len(tokens),
        max_model_len=loaded_info(client).max_seq_len,
        token_strs=[raw.decode(errors="replace") for raw in pieces] if body.return_token_strs else None,
    )


@router.post("/detokenize", openapi_extra=API)
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> DetokenizeResponse:
    client = await state.serving(request, body.model)
    text = await client.decode(body.tokens)
    return DetokenizeResponse(content=text, prompt=text)


@router.post("/apply-template", openapi_extra=API)
async def apply_template(body: ChatCompletionRequest, request: Request, state: State) -> RenderedTemplate:
    """The prompt that the same body would make as a chat completion."""
    client = await state.serving(request, body.model)
    writer = await state.prompt_writer(client)
    images = await load_images(body.messages, loaded_info(client), state.images)
    prompt = await state.prompts.run(partial(writer.chat, body, images))
    return RenderedTemplate(prompt=prompt.text)


async def _encode(
    state: ServerState,
    client: EngineClient,
    body: PromptRequest,
    text: str | None,
    *,
    add_bos: bool | None,
    encode_special_tokens: bool,
) -> list[int]:
    """Token ids of the text, or of the conversation where there is no text."""
    literals: Sequence[TextSpan] = ()
    shown: Sequence[ImageInput] = ()
    if text is None:
        writer = await state.prompt_writer(client)
        images = await load_images(body.messages, loaded_info(client), state.images)
        prompt = await state.prompts.run(partial(writer.chat, body, images))
        (text, literals, _), shown = prompt.rendered, prompt.images
        add_bos = False if writer.template.begins_with_bos(text, literals) else add_bos
    return await client.encode(
        text, add_bos=add_bos, encode_special_tokens=encode_special_tokens, literals=literals, images=shown
    )
