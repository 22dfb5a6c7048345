"""Tokens, text and conversations, one from the other."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, model_validator

from common.limits import MAX_BODY_MARKS, MAX_TOKENIZED, at_most
from common.sampling import NonNegative, RequestModel
from endpoints.OAI.types.chat import ChatCompletionRequest, Messages

_Text: TypeAlias = Annotated[str, Field(max_length=MAX_TOKENIZED)]
_TokenIds: TypeAlias = Annotated[list[NonNegative], at_most(MAX_BODY_MARKS)]


class PromptRequest(ChatCompletionRequest):
    """A text, or a conversation with all that a chat completion takes: the same body can be sent to both.

    Whether a text gets a BOS token is up to the model's tokenizer_config, as in a completion, or to `add_bos_token`.
    """

    messages: Messages = Field([], description="Instead of a text.")


class TokenEncodeRequest(PromptRequest):
    text: _Text | None = Field(None, description="A text, or a list of messages.")
    add_generation_prompt: bool | None = False
    encode_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _text_may_be_messages(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("text"), list):
            return {**values, "messages": values["text"], "text": None}
        return values


class TokenEncodeResponse(BaseModel):
    tokens: list[int]
    length: int


class TokenDecodeRequest(RequestModel):
    tokens: _TokenIds
    model: str | None = None
    decode_special_tokens: bool = True


class TokenDecodeResponse(BaseModel):
    text: str


class TokenizeRequest(PromptRequest):
    """llama.cpp's server reads `content` and the fields after it, vLLM `prompt` or `messages` and the last one."""

    content: _Text | None = None
    add_special: bool = Field(False, description="With content: add a BOS token where the model has one added.")
    parse_special: bool = Field(True, description="Control tokens in the text are control tokens.")
    with_pieces: bool = Field(False, description="Each token with its text, or its bytes where they are no text.")
    prompt: _Text | None = None
    return_token_strs: bool = False


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int]  # text, or bytes that are no whole characters

    @classmethod
    def of(cls, token: int, raw: bytes) -> TokenPiece:
        try:
            return cls(id=token, piece=raw.decode())
        except UnicodeDecodeError:
            return cls(id=token, piece=list(raw))


class TokenizeResponse(BaseModel):
    """What llama.cpp's server and vLLM answer, in one."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    tokens: _TokenIds
    model: str | None = None


class DetokenizeResponse(BaseModel):
    """The text, as llama.cpp's server calls it and as vLLM does."""

    content: str
    prompt: str


class RenderedTemplate(BaseModel):
    prompt: str
