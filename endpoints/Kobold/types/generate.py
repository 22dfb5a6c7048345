"""Bodies and answers of Kobold's routes that generate."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, PlainValidator, model_validator

from common.limits import MAX_TOP_LOGPROBS, MAX_WORDS, ShortText, at_most
from common.sampling import RequestModel, SamplingParameters, Seed
from endpoints.OAI.types.chat import ChatLogprobs
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE
from endpoints.OAI.types.completion import CompletionRequest, Prompt

# Of `sampler_order`: the temperature, and the samplers that leave tokens out and that the engine has.
TEMPERATURE: Final = 5
CUTS: Final = (0, 2)  # top-k, top-p

_SEEDS: Final = 2**63  # that the engine knows; KoboldAI's go to twice as many

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


def _one_text(value: object) -> list[Prompt]:
    if not isinstance(value, str):
        raise ValueError("should be a string")
    return [value]


def _seed(value: object) -> object:
    if type(value) is not int:
        return value
    return value % _SEEDS if value >= 0 else None


class Genkey(RequestModel):
    """The generation that a route is about; without a key, the client's own that have none."""

    genkey: ShortText = ""


class KoboldGenerateRequest(CompletionRequest):
    """KoboldCpp's names, beside all that completions take."""

    prompt: Annotated[list[Prompt], PlainValidator(_one_text, json_schema_input_type=str)]
    genkey: ShortText = Field("", description="With it the client can ask for the text so far, or end the generation.")
    memory: str = Field("", description="Text before the prompt, which stays where the prompt is cut.")
    max_context_length: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Tokens of prompt and answer together. A longer prompt loses its beginning, so that there is room "
        "for max_length more tokens, or for half of it at most.",
    )
    images: list[Any] = Field([], description="Has to be empty: a chat completion takes images.")

    seed: Annotated[Seed | None, BeforeValidator(_seed)] = Field(
        None, validation_alias=AliasChoices("sampler_seed", "seed"), description="-1: any"
    )
    sampler_order: Annotated[list[int], at_most(MAX_WORDS)] = Field(
        [], description="Of the order, only the place of the temperature (5) counts."
    )
    temperature_last: bool = Field(True, description="As in KoboldCpp's order.")
    rep_pen_slope: float = 0.0
    ban_eos_token: bool = Field(
        False, validation_alias=AliasChoices("ban_eos_token", "ignore_eos", "bypass_eos", "use_default_badwordsids")
    )
    singleline: bool = Field(False, description="End the answer with its first line.")
    trim_stop: bool = Field(True, description="false: the stop sequence that ends the answer is part of it.")
    render_special: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = Field(5, description="With logprobs.")

    @model_validator(mode="before")
    @classmethod
    def _banned_texts(cls, values: object) -> object:
        """KoboldCpp bans texts where TabbyAPI bans ids, under the same name."""
        if not isinstance(values, dict) or not isinstance(given := values.get("banned_tokens"), list):
            return values
        texts = [item for item in given if isinstance(item, str)]
        others = [item for item in given if not isinstance(item, str)]
        banned = values.get("banned_strings") or []
        return values | {
            "banned_tokens": others,
            "banned_strings": [*banned, *texts] if isinstance(banned, list) else banned,
        }

    @property
    def stop_strings(self) -> list[str]:
        return [*super().stop_strings, *(["\n"] if self.singleline else [])]

    def without_effect(self) -> list[str]:
        own = {
            "rep_pen_slope": self.repetition_penalty != 1 and self.rep_pen_slope not in (0, 1),
            "render_special": self.render_special,
        }
        return [*super().without_effect(), *(name for name, is_on in own.items() if is_on)]

    def parameters(self) -> SamplingParameters:
        parameters = super().parameters()
        last = self.temperature_last
        if TEMPERATURE in self.sampler_order:
            cuts = [self.sampler_order.index(sampler) for sampler in CUTS if sampler in self.sampler_order]
            last = self.sampler_order.index(TEMPERATURE) > min(cuts, default=-1)
        # 0 is Kobold's word for the whole context.
        return msgspec.structs.replace(parameters, temperature_last=last, penalty_range=parameters.penalty_range or -1)


class KoboldToken(BaseModel):
    """A piece of a streamed answer; the last one says how it ended."""

    token: str
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = LEFT_OUT_IF_NONE


class KoboldResult(BaseModel):
    """
    Attributes:
        finish_reason: abort where the client has ended it.
    """

    text: str
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class KoboldResults(BaseModel):
    results: list[KoboldResult]


class TextSoFar(BaseModel):
    text: str


class TextsSoFar(BaseModel):
    """One for each answer of the generation; none where there is no such generation."""

    results: list[TextSoFar]


class Aborted(BaseModel):
    """Nothing of that generation goes on any more, whether there was one or not."""

    success: Literal[True] = True
