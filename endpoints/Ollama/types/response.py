"""Answers of Ollama's routes that generate or embed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from endpoints.OAI.types.common import LEFT_OUT_IF_NONE

DoneReason: TypeAlias = Literal["stop", "length", "load", "unload"]


def now() -> str:
    """RFC 3339, in UTC."""
    return timestamp(datetime.now(UTC))


def timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class CalledFunction(BaseModel):
    """
    Attributes:
        index: of the call in the answer.
    """

    index: int
    name: str
    arguments: dict[str, Any]


class Call(BaseModel):
    id: str
    function: CalledFunction


class Message(BaseModel):
    """
    Attributes:
        thinking: a thought, told apart from the answer.
        tool_calls: whole ones.
    """

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = LEFT_OUT_IF_NONE
    tool_calls: list[Call] | None = LEFT_OUT_IF_NONE


class Answer(BaseModel):
    """What a piece of an answer, the last one and the whole of it have in common. Durations are nanoseconds.

    Attributes:
        prompt_eval_count: tokens of the prompt, those in the cache included.
        eval_count: tokens of the answer.
    """

    model: str
    created_at: str = Field(default_factory=now)
    done: bool = False
    done_reason: DoneReason | None = LEFT_OUT_IF_NONE
    total_duration: int | None = LEFT_OUT_IF_NONE
    load_duration: int | None = LEFT_OUT_IF_NONE
    prompt_eval_count: int | None = LEFT_OUT_IF_NONE
    prompt_eval_duration: int | None = LEFT_OUT_IF_NONE
    eval_count: int | None = LEFT_OUT_IF_NONE
    eval_duration: int | None = LEFT_OUT_IF_NONE
    logprobs: list[Logprob] | None = LEFT_OUT_IF_NONE


class ChatAnswer(Answer):
    message: Message


class GenerateAnswer(Answer):
    response: str = ""
    thinking: str | None = LEFT_OUT_IF_NONE
    tool_calls: list[Call] | None = LEFT_OUT_IF_NONE


class Embedded(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedPrompt(BaseModel):
    """Of the route before /api/embed."""

    embedding: list[float]
