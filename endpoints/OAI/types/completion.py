"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeGuard

from pydantic import BaseModel, Field, PlainValidator

from common.boundaries import CacheBoundaries
from common.limits import MAX_ANSWERS, MAX_PROMPTS
from common.sampling import is_token_id
from endpoints.OAI.types.common import (
    LEFT_OUT_IF_NONE,
    Choice,
    Envelope,
    GenerationFields,
    PromptLogprobs,
    PromptProgress,
    Usage,
)

Prompt: TypeAlias = str | list[int]  # text, or token ids


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(is_token_id, value))


def _is_prompt(value: object) -> TypeGuard[Prompt]:
    return isinstance(value, str) or _is_tokens(value)


def _prompts(value: object) -> list[Prompt]:
    """OpenAI takes a text, a list of texts, token ids, or a list of lists of token ids."""
    given: list[object] = value if isinstance(value, list) and not _is_tokens(value) else [value]
    prompts = [prompt for prompt in given if _is_prompt(prompt)]
    if len(prompts) != len(given):
        raise ValueError("should be a string, a list of strings, a list of token ids, or a list of such lists")
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"should hold 1 to {MAX_PROMPTS} prompts")
    return prompts


Prompts: TypeAlias = Annotated[
    list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


class CompletionRequest(GenerationFields):
    prompt: Prompts
    suffix: str | None = Field(None, description="What follows the answer, for models that can fill in the middle.")
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = Field(
        None, description="How many answers to generate; the n most likely are returned."
    )

    cache_boundaries: CacheBoundaries = Field(
        [],
        description="Places in each prompt, in characters or tokens from its beginning, at which a model with "
        "recurrent layers shall keep a checkpoint, because later prompts will differ from there on.",
    )

    @property
    def per_prompt(self) -> int:
        """Answers to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of


class CompletionLogprobs(BaseModel):
    """Parallel lists, one item for each token; nulls for a first token of the prompt, which nothing stands before.

    Attributes:
        tokens: text; one that is no complete character as OpenAI writes it, `bytes:\\xc3`.
        text_offset: characters from the start of the text, over all pieces of a stream, to where the token begins.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def extend(self, other: CompletionLogprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = LEFT_OUT_IF_NONE


class Completion(Envelope):
    """A whole answer, and a piece of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = LEFT_OUT_IF_NONE
    prompt_progress: PromptProgress | None = LEFT_OUT_IF_NONE
