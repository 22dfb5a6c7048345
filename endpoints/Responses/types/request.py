"""Bodies of `/v1/responses` and `/v1/responses/input_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, Field

from common.limits import MAX_WORDS, ShortText, at_most
from common.sampling import Integer, RequestModel, SamplingFields
from endpoints.Responses.types.items import InputItems
from endpoints.Responses.types.tools import ToolChoice, Tools

MAX_METADATA = 16  # pairs; as at OpenAI

Metadata: TypeAlias = Annotated[dict[ShortText, ShortText], Field(max_length=MAX_METADATA)]


def _member(*names: str) -> Any:
    return Field(None, validation_alias=AliasChoices(*names))


class ReasoningOptions(RequestModel):
    """
    Attributes:
        summary: asks for thoughts as summaries. They are the thoughts themselves, in the members and events that
            clients show.
        generate_summary: the name before.
    """

    effort: ShortText | None = None
    summary: ShortText | None = _member("summary", "generate_summary")


class TextFormat(RequestModel):
    """What an answer has to look like.

    Attributes:
        schema_: a JSON schema, of the type `json_schema`.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Any = _member("schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat = TextFormat()
    verbosity: ShortText | None = None


class ResponsesRequest(SamplingFields):
    """The sampling parameters of the other routes are taken too."""

    model: str | None = Field(None, description="The loaded model answers, whatever the name.")
    input: InputItems = Field([])
    instructions: str | None = Field(
        None,
        description="A system message before everything; previous_response_id does not bring back an earlier one.",
    )
    previous_response_id: str | None = Field(None, description="Go on from a stored response.")
    conversation: Any = Field(None, description="There are no conversations here.")
    prompt: Any = Field(None, description="There are no stored prompts here.")
    store: bool = Field(True, description="Keep the response, as far as network.response_store_mb allows.")
    background: bool = Field(False, description="Answer at once, with a response to be asked for later.")
    stream: bool = False

    max_tokens: Annotated[Integer, Field(ge=-1)] = Field(
        0,
        validation_alias=AliasChoices("max_output_tokens", "max_completion_tokens", "max_tokens"),
        description="Of the answer, thoughts included. 0 or -1: all that fit",
    )
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    tools: Tools = Field([], description="Functions and custom tools. What OpenAI runs itself is left out.")
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = Field(True, description="false: one call at most.")
    max_tool_calls: Integer | None = Field(None, description="Of built-in tools, of which there are none.")
    include: Annotated[list[ShortText], at_most(MAX_WORDS)] = Field(
        [], description="reasoning.encrypted_content and message.output_text.logprobs have an effect."
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto is the same here: an input that does not fit is refused."
    )

    template_vars: dict[str, Any] = Field({}, validation_alias=AliasChoices("template_vars", "chat_template_kwargs"))
    enable_thinking: bool | None = None
    reasoning_budget_tokens: Integer | None = Field(None, description="Tokens after which a thought is ended.")

    metadata: Metadata = Field({})
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def seals_thoughts(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    @property
    def alternatives(self) -> int | None:
        """How many to report for each token; None for no log-probabilities."""
        return self.top_logprobs if "message.output_text.logprobs" in self.include else None
