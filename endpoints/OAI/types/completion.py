"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeGuard

from pydantic import BaseModel, Field, PlainValidator

from common.sampling import is_token_id
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE, Choice, Envelope, GenerationFields, Usage

Prompt: TypeAlias = str | list[int]  # text, or token ids

MAX_PROMPTS = 128


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
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(None, description="Only the same as n.")


class CompletionLogprobs(BaseModel):
    """Parallel lists, one item for each token. `text_offset` counts characters from the start of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class Completion(Envelope):
    """A whole answer, and a piece of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = LEFT_OUT_IF_NONE
