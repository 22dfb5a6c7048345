"""What requests and responses of the two generating routes have in common."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import AliasChoices, BaseModel, Field

from common.generation import FinishReason
from common.limits import MAX_ANSWERS, MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, MAX_WORDS, ShortText, at_most
from common.sampling import NonNegative, RequestModel, SamplingFields
from endpoints.core.types.cache import CacheExplanation

LEFT_OUT_IF_NONE: Any = Field(None, exclude_if=lambda value: value is None)

# --- requests -----------------------------------------------------------------------------------------------------


class StreamOptions(RequestModel):
    include_usage: bool = Field(default=False, description="A last chunk with the usage figures.")
    continuous_usage_stats: bool = Field(default=False, description="With include_usage: figures in every chunk.")
    include_progress: bool = Field(default=False, description="Chunks that tell how far the prefill is.")

    @property
    def usage_so_far(self) -> bool:
        return self.include_usage and self.continuous_usage_stats


Choices: TypeAlias = Annotated[list[str], at_most(MAX_CHOICES)]


def _member(*names: str) -> Any:
    return Field(None, validation_alias=AliasChoices(*names))


class ResponseFormat(RequestModel):
    """What an answer has to look like. Which member counts depends on the type; see `utils/constraints.py`."""

    type: str = "text"
    json_schema: Any = Field(default=None, description="A JSON schema, or OpenAI's object with the schema in it.")
    schema_: Any = _member("schema")
    regex: str | None = _member("regex", "pattern")
    grammar: str | None = None
    choice: Choices | None = _member("choice", "choices")
    value: Any = Field(
        default=None, description="The schema or pattern under the name that text-generation-inference uses."
    )


class StructuredOutputs(RequestModel):
    """vLLM's name for the same."""

    json_: Any = _member("json")
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
    structural_tag: Any = None


class GenerationFields(SamplingFields):
    """Fields of both routes beside the sampling parameters."""

    model: str | None = Field(None, description="The loaded model answers, whatever the name.")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = Field(False, description="The same as stream_options.include_progress.")
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = Field(0, description="llama.cpp's name for logprobs.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="Alternatives to report for each token of the prompt, as vLLM does; not in streams."
    )
    echo: bool = Field(False, description="Begin with the prompt, or with the assistant message that is gone on from.")
    stop_token_ids: Annotated[list[NonNegative], at_most(MAX_STOPS)] = Field([])
    include_stop_str_in_output: bool = False
    explain_cache: bool = Field(False, description="Say in the usage figures why no more of the prompt was cached.")
    modalities: Annotated[list[ShortText], at_most(MAX_WORDS)] = Field([], description="May hold text only.")
    user: str | None = None

    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    json_schema: Any = Field(None, description="An empty schema asks for nothing.")
    guided_json: Any = None
    regex_pattern: str | None = _member("regex_pattern", "regex")
    guided_regex: str | None = None
    grammar_string: str | None = Field(
        None,
        validation_alias=AliasChoices("grammar_string", "grammar", "ebnf"),
        description="GBNF if it contains ::=, else Lark.",
    )
    guided_grammar: str | None = None
    guided_choice: Choices | None = None

    @property
    def shows_progress(self) -> bool:
        return self.return_progress or self.stream_options.include_progress


# --- responses ----------------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Of the prompt, those that were not processed again.")
    vram_tokens: int = Field(description="Of `cached_tokens`, those that were in VRAM.")
    ram_tokens: int = Field(description="Of `cached_tokens`, those that came back from host RAM.")
    disk_tokens: int = Field(description="Of `cached_tokens`, those that came back from disk.")
    matched_tokens: int = Field(description="Of the prompt, those whose keys and values were cached.")
    replayed_tokens: int = Field(
        description="Of `matched_tokens`, those that were processed again, for want of a recurrent checkpoint."
    )
    explanation: CacheExplanation | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="With `explain_cache`: what `/v1/cache/explain` would have said of the first prompt.",
    )


class CompletionTokensDetails(BaseModel):
    """Predictions are the tokens that a drafter proposed."""

    accepted_prediction_tokens: int = Field(description="Tokens of a drafter that the model agreed with.")
    rejected_prediction_tokens: int = Field(description="Those that it did not agree with.")
    reasoning_tokens: int = Field(description="Tokens of thoughts.")


class Usage(BaseModel):
    """OpenAI's token counts, and TabbyAPI's timings in seconds and tokens per second."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens of all answers.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    queue_time: float = Field(description="Seconds until the engine began with the prompt.")
    prompt_time: float = Field(description="Seconds of the prefill.")
    prompt_tokens_per_sec: float | None = Field(description="Of the tokens that were not cached.")
    completion_time: float = Field(description="Seconds of generation.")
    completion_tokens_per_sec: float | None = Field(description="Of all answers.")
    total_time: float = Field(description="Prefill and generation together, without the queue.")


class PromptProgress(BaseModel):
    """How far the prefill of a prompt is, in tokens; llama.cpp's names.

    Attributes:
        index: of the answer.
        processed: of `total`, the cached ones included.
        time_ms: since the engine took the prompt.
    """

    index: int
    total: int
    cache: int
    processed: int
    time_ms: int


class PromptLogprob(BaseModel):
    """vLLM's names.

    Attributes:
        rank: 1 for the most likely token; null for one that is not among those that were looked at.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]  # one item for each token, by token id


class Envelope(BaseModel):
    """What every response begins with; the same in all pieces of a stream."""

    id: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str


class Choice(BaseModel):
    """How an answer ended, as far as it has.

    Attributes:
        eos_reason: the engine's reason (TabbyAPI's name).
        stop_str: the stop string, or text of the stop token, that ended it (TabbyAPI's name).
    """

    index: int
    finish_reason: FinishReason | None = None
    eos_reason: str | None = LEFT_OUT_IF_NONE
    stop_str: str | None = LEFT_OUT_IF_NONE
