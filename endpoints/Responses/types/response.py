"""The response object and what it consists of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from endpoints.OAI.types.common import LEFT_OUT_IF_NONE
from endpoints.Responses.types.items import ItemStatus

ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

# --- items --------------------------------------------------------------------------------------------------------


class Alternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class OutputText(BaseModel):
    """
    Attributes:
        annotations: there are none.
    """

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class Reasoning(BaseModel):
    """A thought, either as the content or, on request, as the summary.

    Attributes:
        encrypted_content: on request; see `utils/thoughts.py`.
    """

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | None = LEFT_OUT_IF_NONE
    encrypted_content: str | None = LEFT_OUT_IF_NONE


class FunctionCall(BaseModel):
    """
    Attributes:
        arguments: JSON of an object.
        namespace: of the function, where it was described in one.
    """

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | None = LEFT_OUT_IF_NONE


class CustomCall(BaseModel):
    """A call of a tool that takes a text."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | None = LEFT_OUT_IF_NONE


OutputItem: TypeAlias = Annotated[OutputMessage | Reasoning | FunctionCall | CustomCall, Field(discriminator="type")]

# --- responses ----------------------------------------------------------------------------------------------------


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Of the prompt, those that were not processed again.")
    cache_write_tokens: int = Field(description="Of the prompt, the others.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ReasoningUsed(BaseModel):
    effort: str | None
    summary: str | None


class FormatUsed(BaseModel):
    type: str
    name: str | None = LEFT_OUT_IF_NONE
    description: str | None = LEFT_OUT_IF_NONE
    schema_: Any = Field(None, alias="schema", exclude_if=lambda value: value is None)
    strict: bool | None = LEFT_OUT_IF_NONE


class TextUsed(BaseModel):
    format: FormatUsed
    verbosity: str | None = LEFT_OUT_IF_NONE


class ResponseObject(BaseModel):
    """
    Attributes:
        created_at, completed_at: seconds since the epoch.
        tools: those that the model could call, in the form of the request.
        store: whether the response is kept.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: Usage | None = None

    instructions: str | None
    previous_response_id: str | None
    conversation: None = None
    store: bool
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    reasoning: ReasoningUsed
    text: TextUsed
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"] = "default"


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """
    Attributes:
        data: items of an input, and answers that it went on from.
        first_id, last_id: of `data`; empty where there are none.
    """

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
