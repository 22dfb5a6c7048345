"""What requests and responses of the two generating routes have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from common.generation import FinishReason
from common.sampling import RequestModel, SamplingFields

LEFT_OUT_IF_NONE: Any = Field(None, exclude_if=lambda value: value is None)

MAX_ANSWERS = 128  # of one request, as at OpenAI


class StreamOptions(RequestModel):
    include_usage: bool = False


class ResponseFormat(RequestModel):
    type: str = "text"


class GenerationFields(SamplingFields):
    """Fields of both routes beside the sampling parameters."""

    model: str | None = Field(None, description="The loaded model answers, whatever the name.")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    user: str | None = None
    response_format: ResponseFormat = ResponseFormat()
    json_schema: Any = None
    regex_pattern: str | None = None
    grammar_string: str | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """OpenAI's token counts, and TabbyAPI's timings in seconds and tokens per second."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prompt_time: float
    prompt_tokens_per_sec: float | None
    completion_time: float
    completion_tokens_per_sec: float | None
    total_time: float


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
