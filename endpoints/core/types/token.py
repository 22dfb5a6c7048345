"""Tokens and text, one from the other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field

from common.sampling import NonNegative, RequestModel
from endpoints.OAI.types.message import ChatMessage


class TokenRequest(RequestModel):
    # None: as the model's tokenizer_config says, which is also how prompts of completions are encoded.
    add_bos_token: bool | None = None
    encode_special_tokens: bool = True
    decode_special_tokens: bool = True


class TokenEncodeRequest(TokenRequest):
    text: str | Annotated[list[ChatMessage], Field(min_length=1)]
    template_vars: dict[str, Any] = Field({}, validation_alias=AliasChoices("template_vars", "chat_template_kwargs"))


class TokenEncodeResponse(BaseModel):
    tokens: list[int]
    length: int


class TokenDecodeRequest(TokenRequest):
    tokens: list[NonNegative]


class TokenDecodeResponse(BaseModel):
    text: str
