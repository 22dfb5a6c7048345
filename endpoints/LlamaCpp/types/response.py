"""Answers of `/completion` and `/infill`, whole and in pieces."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from endpoints.core.types.cache import CacheExplanation
from endpoints.core.types.props import SamplerDefaults
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE, PromptProgress

StopType: TypeAlias = Literal["eos", "limit", "word"]
NO_SLOT = -1  # which a client may send back: any


class TokenProbability(BaseModel):
    """Natural logarithms, as the model gives them."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class SampledProbability(TokenProbability):
    top_logprobs: list[TokenProbability]


class TokenBias(BaseModel):
    token: int
    bias: float | None  # None: never


class GenerationSettings(SamplerDefaults):
    """What was in force for an answer.

    Attributes:
        samplers: in the order in which they are applied.
    """

    n_ctx: int
    model: str
    max_tokens: int
    min_tokens: int
    adaptive_target: float
    adaptive_decay: float
    samplers: list[str]
    logit_bias: list[TokenBias]
    grammar: str
    json_schema: Any
    n_probs: int
    timings_per_token: bool


class Timings(BaseModel):
    """Milliseconds, and tokens per second; 0 where there was nothing to measure.

    Attributes:
        cache_n: tokens of the prompt that did not have to be processed.
        prompt_n: those that had to be.
        draft_n: tokens that a drafter proposed.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = LEFT_OUT_IF_NONE
    draft_n_accepted: int | None = LEFT_OUT_IF_NONE


class Piece(BaseModel):
    """A part of a streamed answer.

    Attributes:
        tokens_evaluated: tokens of the prompt.
    """

    index: int
    content: str = ""
    tokens: list[int] = []
    stop: Literal[False] = False
    id_slot: int = NO_SLOT
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | None = LEFT_OUT_IF_NONE
    prompt_progress: PromptProgress | None = LEFT_OUT_IF_NONE
    completion_probabilities: list[SampledProbability] | None = LEFT_OUT_IF_NONE


class LlamaCppCompletion(BaseModel):
    """A whole answer, and the last event of a streamed one, which has no content.

    Attributes:
        tokens_evaluated: tokens of the prompt.
        tokens_cached: those of them that did not have to be processed.
        truncated: the context was full before the answer was.
        cache_explanation: with `explain_cache`.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int = NO_SLOT
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[SampledProbability] | None = LEFT_OUT_IF_NONE
    cache_explanation: CacheExplanation | None = LEFT_OUT_IF_NONE
