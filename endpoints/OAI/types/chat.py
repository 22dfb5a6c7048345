"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field

from common.sampling import RequestModel
from endpoints.OAI.types.common import (
    LEFT_OUT_IF_NONE,
    Choice,
    Envelope,
    GenerationFields,
    PromptLogprobs,
    PromptProgress,
    Usage,
)
from endpoints.OAI.types.message import ChatMessage


class ReasoningOptions(RequestModel):
    effort: str | None = None
    enabled: bool | None = None


class ToolFunction(RequestModel):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: ToolFunction


class ChatCompletionRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = Field(None, description="Default: true, unless continue_final_message is.")
    continue_final_message: bool = False
    response_prefix: str | None = Field(None, description="Text that the answer goes on from; not part of it.")
    template_vars: dict[str, Any] = Field({}, validation_alias=AliasChoices("template_vars", "chat_template_kwargs"))
    reasoning: ReasoningOptions = ReasoningOptions()
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    verbosity: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="Shown to the chat template as they are.")
    functions: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"


class TokenLogprob(BaseModel):
    token: str
    token_id: int
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Envelope):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = LEFT_OUT_IF_NONE


class Delta(BaseModel):
    role: Literal["assistant"] | None = LEFT_OUT_IF_NONE
    content: str | None = LEFT_OUT_IF_NONE


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Envelope):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = LEFT_OUT_IF_NONE
    prompt_progress: PromptProgress | None = LEFT_OUT_IF_NONE
