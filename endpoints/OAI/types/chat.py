"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field

from common.boundaries import CacheBoundaries
from common.limits import MAX_IMAGES, MAX_MESSAGES, MAX_TOOLS, ShortText, at_most
from common.sampling import Integer, RequestModel
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
from endpoints.OAI.types.tools import CalledTool, CalledToolDelta, FunctionChoice, FunctionSpec, Tool, ToolChoice


class ReasoningOptions(RequestModel):
    """OpenRouter's object."""

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: Integer | None = Field(
        default=None,
        validation_alias=AliasChoices("max_tokens", "budget_tokens"),
        description="The same as reasoning_budget_tokens.",
    )
    exclude: bool = Field(default=False, description="Leave thoughts out of the response.")


class ThinkingOptions(RequestModel):
    """Anthropic's object, which other servers also take in chat completions."""

    type: str | None = Field(default=None, description="enabled, disabled; anything else is up to the template.")
    budget_tokens: Integer | None = None


def _thinking_options(value: object) -> object:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


ReasoningFormat: TypeAlias = Literal["auto", "deepseek", "deepseek-legacy", "parsed", "none", "raw", "hidden"]


def _few_images(messages: list[ChatMessage]) -> list[ChatMessage]:
    images = sum(part.is_image for message in messages for part in message.content or ())
    if images > MAX_IMAGES:
        raise ValueError(f"should hold at most {MAX_IMAGES} images together")
    return messages


Messages: TypeAlias = Annotated[
    list[ChatMessage], at_most(MAX_MESSAGES), Field(min_length=1), AfterValidator(_few_images)
]
Tools: TypeAlias = Annotated[list[Tool], at_most(MAX_TOOLS)]
Functions: TypeAlias = Annotated[list[FunctionSpec], at_most(MAX_TOOLS)]


class ChatCompletionRequest(GenerationFields):
    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Default: true, unless continue_final_message is.")
    continue_final_message: bool = False
    response_prefix: str | None = Field(None, description="Text that the answer goes on from; not part of it.")
    template_vars: dict[str, Any] = Field({}, validation_alias=AliasChoices("template_vars", "chat_template_kwargs"))
    reasoning: ReasoningOptions = ReasoningOptions()
    thinking: Annotated[
        ThinkingOptions, BeforeValidator(_thinking_options, json_schema_input_type=bool | ThinkingOptions)
    ] = ThinkingOptions()
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    verbosity: str | None = None
    reasoning_budget_tokens: Integer | None = Field(
        None,
        validation_alias=AliasChoices(
            "reasoning_budget_tokens",
            "reasoning_budget",
            "thinking_budget_tokens",
            "thinking_budget",
            "thinking_token_budget",
            "max_thinking_tokens",
        ),
        description="Tokens after which a thought is ended. Negative: as the model's settings say.",
    )
    reasoning_budget_message: ShortText | None = Field(
        None,
        validation_alias=AliasChoices("reasoning_budget_message", "thinking_budget_message"),
        description="Text put at the end of a thought that reaches its budget.",
    )
    include_reasoning: bool | None = Field(
        None, description="true: thoughts also under the name reasoning; false: leave them out of the response."
    )
    reasoning_format: ReasoningFormat = Field(
        "auto", description="none or raw: leave thoughts in the content, with their tags; hidden: leave them out."
    )
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool = Field(True, description="false: one call at most.")
    functions: Functions | None = Field(None, description="The way before tools. Calls are tool_calls.")
    function_call: FunctionChoice | None = Field(None, description="The way before tool_choice.")
    cache_boundaries: CacheBoundaries | None = Field(
        None,
        description="Indexes of messages at whose beginning a model with recurrent layers shall keep a checkpoint, "
        "because later prompts will differ from there on; -1 is the last one. Default: what the model's "
        "recurrent_checkpoint_boundaries says. Empty: none.",
    )

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the opening of an assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts, where they are told apart, are part of the response."""
        return self.include_reasoning is not False and not self.reasoning.exclude and self.reasoning_format != "hidden"

    @property
    def thoughts_in_content(self) -> bool:
        return self.reasoning_format in ("none", "raw")

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think; None where the request does not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.reasoning.enabled is not None:
            return self.reasoning.enabled
        by_type = {"enabled": True, "disabled": False}.get(self.thinking.type or "")
        return False if by_type is None and self.effort == "none" else by_type

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or self.reasoning.effort

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens; None where the request names none."""
        given = (self.reasoning_budget_tokens, self.reasoning.max_tokens, self.thinking.budget_tokens)
        return next((budget for budget in given if budget is not None and budget >= 0), None)


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
    """
    Attributes:
        content: null where there is nothing but a thought or calls.
        reasoning: the same as `reasoning_content`, on request.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = LEFT_OUT_IF_NONE
    reasoning: str | None = LEFT_OUT_IF_NONE
    tool_calls: list[CalledTool] | None = LEFT_OUT_IF_NONE


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
    reasoning_content: str | None = LEFT_OUT_IF_NONE
    reasoning: str | None = LEFT_OUT_IF_NONE
    tool_calls: list[CalledToolDelta] | None = LEFT_OUT_IF_NONE


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Envelope):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = LEFT_OUT_IF_NONE
    prompt_progress: PromptProgress | None = LEFT_OUT_IF_NONE
