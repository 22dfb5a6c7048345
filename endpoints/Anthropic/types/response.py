"""What `/v1/messages`, `/v1/messages/count_tokens` and, for Anthropic's clients, `/v1/models` answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# --- content ------------------------------------------------------------------------------------------------------


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingContent(BaseModel):
    """
    Attributes:
        thinking: empty where the request wants thoughts omitted.
        signature: says nothing; clients expect one.
    """

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseContent(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content: TypeAlias = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]

# --- usage --------------------------------------------------------------------------------------------------------


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(BaseModel):
    thinking_tokens: int = Field(default=0, description="Of the output, those of thoughts.")


class UsageDelta(BaseModel):
    """Tokens of a prompt and its answer. The first three figures together are those of the prompt."""

    input_tokens: int = Field(description="Tokens of the prompt that were processed and are not counted below.")
    cache_creation_input_tokens: int = Field(
        default=0,
        description="Tokens of the prompt that were processed and are cached from now on: those in whole pages of 256, "
        "with or without cache_control.",
    )
    cache_read_input_tokens: int = Field(default=0, description="Tokens of the prompt that were cached.")
    output_tokens: int = Field(default=0, description="Tokens of the answer, thoughts included.")
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class Usage(UsageDelta):
    cache_creation: CacheCreation = CacheCreation()
    service_tier: Literal["standard"] = "standard"


# --- responses ----------------------------------------------------------------------------------------------------


class MessageResponse(BaseModel):
    """
    Attributes:
        stop_reason: null at the beginning of a stream only. model_context_window_exceeded: no more fits.
        stop_sequence: of `stop_sequences`, the one that ended the answer.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(BaseModel):
    input_tokens: int


class Model(BaseModel):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"


class ModelPage(BaseModel):
    """All models, on one page."""

    data: list[Model]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None
