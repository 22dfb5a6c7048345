"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from common.errors import Unsupported
from common.sampling import RequestModel
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE, Choice, Envelope, GenerationFields, Usage


class ContentPart(RequestModel):
    type: str = "text"
    text: str = ""


def _content_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of content parts")
    return value


# A text is the same as one part with it.
Content: TypeAlias = Annotated[
    list[ContentPart], BeforeValidator(_content_parts, json_schema_input_type=str | list[ContentPart])
]


class FunctionCall(RequestModel):
    name: str
    arguments: str | dict[str, Any] = ""  # JSON of an object, or the object itself


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One turn.

    Attributes:
        role: passed on to the template as it is; which roles there are is the model's matter.
    """

    role: str = "user"
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def text(self, path: str) -> str | None:
        """The content as one text; None without content.

        Args:
            path: of this message in the request, for errors.

        Raises:
            Unsupported: a part is no text.
        """
        if self.content is None:
            return None
        for index, part in enumerate(self.content):
            if part.type != "text":
                raise Unsupported(
                    f"The loaded model takes text only, not a content part of type {part.type!r}. Images would need "
                    "vision, which is not available here.",
                    param=f"{path}.content.{index}",
                )
        return "".join(part.text for part in self.content)


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
