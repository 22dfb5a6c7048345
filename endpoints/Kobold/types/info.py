"""What Kobold's front ends ask about the server and its model."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from common.generation import Usage
from common.limits import MAX_LISTED_TOKENS, MAX_TOKENIZED
from common.sampling import NonNegative, RequestModel
from endpoints.admission import RequestQueue

# Of the interfaces that are offered: clients compare them.
KOBOLDAI_VERSION: Final = "1.2.5"
KOBOLDCPP_VERSION: Final = "1.74"


class Named(BaseModel):
    result: str


class Number(BaseModel):
    value: int


class KoboldCppVersion(BaseModel):
    """
    Attributes:
        protected: a key is needed.
        vision: the loaded model takes images.
    """

    result: Literal["KoboldCpp"] = "KoboldCpp"
    version: str = KOBOLDCPP_VERSION
    protected: bool
    vision: bool
    txt2img: Literal[False] = False
    transcribe: Literal[False] = False
    multiplayer: Literal[False] = False
    websearch: Literal[False] = False
    tts: Literal[False] = False


class SoftPrompt(BaseModel):
    """Soft prompts belong to KoboldAI; there never are any."""

    value: Literal[""] = ""


class SoftPrompts(BaseModel):
    values: list[str] = []


class Nothing(BaseModel):
    pass


class TokenCountRequest(RequestModel):
    prompt: Annotated[str, Field(max_length=MAX_TOKENIZED)]
    special: bool = Field(True, description="Begin with the BOS token, where the model has one.")


class TokenCount(BaseModel):
    value: int
    ids: list[int]


class DetokenizeRequest(RequestModel):
    ids: list[NonNegative] = Field(max_length=MAX_LISTED_TOKENS)


class Detokenized(BaseModel):
    result: str
    success: Literal[True] = True


class Performance(BaseModel):
    """The client's last answer, and how busy the server is.

    Attributes:
        last_process: seconds of the prefill.
        last_eval: seconds of the generation.
        last_token_count: tokens of the answer.
        last_input_count: tokens of the prompt.
        queue: requests that wait for the model, of all clients.
        idle: 1 while no client has a request.
    """

    last_process: float = 0.0
    last_eval: float = 0.0
    last_token_count: int = 0
    last_input_count: int = 0
    queue: int
    idle: Literal[0, 1]

    @classmethod
    def of(cls, usage: Usage | None, queue: RequestQueue) -> Performance:
        """
        Args:
            usage: of the client's last answer, if there was one.
        """
        known = {} if usage is None else _figures(usage)
        return cls.model_validate(known | {"queue": queue.waiting, "idle": 0 if queue.in_flight else 1})


def _figures(usage: Usage) -> dict[str, float]:
    return {
        "last_process": usage.prompt_seconds,
        "last_eval": usage.completion_seconds,
        "last_token_count": usage.completion_tokens,
        "last_input_count": usage.prompt_tokens,
    }
