"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`.

Beside Anthropic's own fields they take the sampling parameters of the other routes, under the same names. Fields that
are about what only Anthropic's servers have, such as `service_tier`, are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from common.limits import MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_TOOLS, ShortText, at_most
from common.sampling import NonNegative, RequestModel, SamplingFields
from endpoints.OAI.types.tools import FunctionName

# --- blocks -------------------------------------------------------------------------------------------------------


class CacheControl(RequestModel):
    """Marks the end of what later prompts will begin with."""

    type: str = "ephemeral"
    ttl: str | None = Field(None, description="Without effect: what is cached is kept as long as there is room for it.")


class Markable(RequestModel):
    cache_control: CacheControl | None = None


class TextBlock(Markable):
    type: Literal["text"] = "text"
    text: str


class ImageSource(RequestModel):
    """Which member counts depends on the type."""

    type: str = Field(description="base64 or url.")
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Markable):
    type: Literal["image"] = "image"
    source: ImageSource


class OtherBlock(Markable):
    """One that is not known here."""

    type: str


def _as_blocks(value: object) -> object:
    """A text is the same as one block with it."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _among(*classes: type[RequestModel]) -> Discriminator:
    """Tells blocks apart by their type; one that is none of these is an `OtherBlock`."""
    names = {block.model_fields["type"].default: block.__name__ for block in classes}

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return names.get(kind, "OtherBlock") if isinstance(kind, str) else "OtherBlock"

    return Discriminator(tag)


DocumentPart: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[OtherBlock, Tag("OtherBlock")],
    _among(TextBlock, ImageBlock),
]


class DocumentSource(RequestModel):
    """Which member counts depends on the type."""

    type: str = Field(description="text or content.")
    data: str | None = None
    content: (
        Annotated[
            list[DocumentPart],
            at_most(MAX_PARTS),
            BeforeValidator(_as_blocks, json_schema_input_type=str | list[DocumentPart]),
        ]
        | None
    ) = None


class DocumentBlock(Markable):
    type: Literal["document"] = "document"
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Markable):
    type: Literal["search_result"] = "search_result"
    source: str
    title: str
    content: Annotated[list[TextBlock], at_most(MAX_PARTS)]


class ToolReferenceBlock(Markable):
    type: Literal["tool_reference"] = "tool_reference"
    tool_name: str


ShownBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[DocumentBlock, Tag("DocumentBlock")]
    | Annotated[SearchResultBlock, Tag("SearchResultBlock")]
    | Annotated[ToolReferenceBlock, Tag("ToolReferenceBlock")]
    | Annotated[OtherBlock, Tag("OtherBlock")],
    _among(TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolReferenceBlock),
]


class ThinkingBlock(Markable):
    """A thought as a response had it. Its signature is not looked at."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Markable):
    """A thought that nobody can read here: it is left out."""

    type: Literal["redacted_thinking"] = "redacted_thinking"


class ToolUseBlock(Markable):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Any = None


class ToolResultBlock(Markable):
    type: Literal["tool_result"] = "tool_result"
    tool_use_id: str
    content: Annotated[
        list[ShownBlock],
        at_most(MAX_PARTS),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[ShownBlock]),
    ] = Field([])
    is_error: bool = False


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[DocumentBlock, Tag("DocumentBlock")]
    | Annotated[SearchResultBlock, Tag("SearchResultBlock")]
    | Annotated[ToolReferenceBlock, Tag("ToolReferenceBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[OtherBlock, Tag("OtherBlock")],
    _among(
        TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolReferenceBlock, ThinkingBlock,
        RedactedThinkingBlock, ToolUseBlock, ToolResultBlock,
    ),
]  # fmt: skip

# --- messages -----------------------------------------------------------------------------------------------------


class Message(RequestModel):
    """One turn. A system message may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], at_most(MAX_PARTS), BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]


Messages: TypeAlias = Annotated[list[Message], at_most(MAX_MESSAGES), Field(min_length=1)]
System: TypeAlias = Annotated[
    list[TextBlock], at_most(MAX_PARTS), BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]

# --- tools --------------------------------------------------------------------------------------------------------


class Tool(Markable):
    """
    Attributes:
        strict: the schema is enforced while a call is generated.
    """

    type: str = Field("custom", description="custom. Others are known to Anthropic's models or run by its servers.")
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False
    input_examples: list[dict[str, Any]] | None = None


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="With the type tool.")
    disable_parallel_tool_use: bool = Field(False, description="true: one call at most.")


# --- the answer ---------------------------------------------------------------------------------------------------


class Thinking(RequestModel):
    type: str = Field(description="enabled, adaptive or disabled.")
    budget_tokens: NonNegative | None = Field(None, description="Tokens after which a thought is ended.")
    display: str | None = Field(None, description="omitted: thoughts come without their text.")


class OutputFormat(RequestModel):
    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] = Field(validation_alias="schema")


class OutputConfig(RequestModel):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(Markable):
    """What a prompt is made from."""

    model: str | None = Field(None, description="See /v1/models.")
    messages: Messages
    system: System = Field([])
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(
        None, description="Left out: the model does not think, unless its template_vars_default say that it does."
    )
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = Field(None, description="The same as output_config.format.")
    mcp_servers: list[Any] = Field([])
    template_vars: dict[str, Any] = Field({}, validation_alias=AliasChoices("template_vars", "chat_template_kwargs"))


class CountTokensRequest(PromptFields):
    pass


class MessagesRequest(PromptFields, SamplingFields):
    max_tokens: NonNegative = Field(
        default=0, description="0: the prompt is processed and cached, and nothing generated. Left out: all that fit."
    )
    stop_sequences: Annotated[list[ShortText], at_most(MAX_STOPS)] = Field([])
    stream: bool = False

    @property
    def wants_no_answer(self) -> bool:
        return self.max_tokens == 0 and "max_tokens" in self.model_fields_set
