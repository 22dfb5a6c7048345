"""Bodies of `/completion` and `/infill`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from pydantic import AliasChoices, BeforeValidator, Field, PlainValidator

from common.limits import (
    MAX_ANSWERS,
    MAX_BIASES,
    MAX_ENCODED,
    MAX_FILES,
    MAX_PROMPTS,
    MAX_WORDS,
    ShortText,
    at_most,
)
from common.sampling import (
    NEVER,
    Bias,
    Integer,
    NonNegative,
    RequestModel,
    SamplingParameters,
    is_token_id,
)
from endpoints.OAI.types.common import GenerationFields

# --- prompts ------------------------------------------------------------------------------------------------------

Prompt: TypeAlias = str | list[str | int]  # text, or token ids with texts between them, one after the other


def _is_sequence(value: object) -> bool:
    """Whether a list is one prompt. Texts alone are prompts of their own."""
    if not isinstance(value, list) or not all(isinstance(item, str) or is_token_id(item) for item in value):
        return False
    return any(not isinstance(item, str) for item in value)


def _prompt(value: object) -> Prompt:
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise ValueError("should hold no multimodal_data, because only text is taken here")
        value = value.get("prompt_string")
    elif _is_sequence(value):
        return cast(Prompt, value)
    if not isinstance(value, str):
        raise ValueError("should be text, token ids, texts and ids, an object with prompt_string, or a list of these")
    return value


def _prompts(value: object) -> list[Prompt]:
    given = value if isinstance(value, list) and not _is_sequence(value) else [value]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise ValueError(f"should hold 1 to {MAX_PROMPTS} prompts")
    prompts = [_prompt(item) for item in given]
    if sum(isinstance(part, str) for prompt in prompts if isinstance(prompt, list) for part in prompt) > MAX_ENCODED:
        raise ValueError(f"should hold at most {MAX_ENCODED} texts between token ids")
    return prompts


_PromptSchema: TypeAlias = str | list[str | int] | dict[str, Any]
Prompts: TypeAlias = Annotated[
    list[Prompt], PlainValidator(_prompts, json_schema_input_type=_PromptSchema | list[_PromptSchema])
]

# --- sampling -----------------------------------------------------------------------------------------------------

# llama.cpp's name of a sampler -> the parameters that turn it on.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "temperature": ("temperature",),
    "xtc": ("xtc_probability",),
    "adaptive_p": ("adaptive_target",),
}
CUTS = ("top_k", "top_p", "min_p")  # of them, those that leave tokens out; the temperature comes before or after
_NEUTRAL = SamplingParameters()

_GivenBias: TypeAlias = Bias | Literal[False] | None
_GivenBiases: TypeAlias = dict[str, _GivenBias] | list[tuple[NonNegative | str, _GivenBias]]


def _is_bias_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and (isinstance(value[0], str) or is_token_id(value[0]))


def _bias_pairs(value: object) -> list[tuple[object, object]]:
    """Of pairs, or of a mapping, in which an id is a string too. False stands for never."""
    if isinstance(value, dict):
        pairs = [(int(key) if str(key).isdecimal() else key, bias) for key, bias in value.items()]
    elif isinstance(value, list) and all(map(_is_bias_pair, value)):
        pairs = [(token, bias) for token, bias in value]
    else:
        raise ValueError("should map token ids or texts to biases, or be a list of such pairs")
    return [(token, NEVER if bias is False else bias) for token, bias in pairs if bias is not None]


def _biases_of_ids(value: object) -> object:
    return {token: bias for token, bias in _bias_pairs(value) if not isinstance(token, str)}


def _biases_of_texts(value: object) -> object:
    return {token: bias for token, bias in _bias_pairs(value) if isinstance(token, str)}


def _greedy_if_negative(value: object) -> object:
    return 0.0 if isinstance(value, (int, float)) and value < 0 else value


def _any_json(value: object) -> object:
    """TabbyAPI's clients mean nothing by an empty schema; those of llama.cpp mean what it says."""
    return True if value == {} else value


# --- bodies -------------------------------------------------------------------------------------------------------


class LoraScale(RequestModel):
    id: int
    scale: float


class CompletionFields(GenerationFields):
    """What both routes take beside the prompt.

    Ignored: `cache_prompt` (there always is a cache), `id_slot` (there are no slots), and `n_keep`, `n_discard` and
    `n_cache_reuse`, which are about moving on in a context that is full.
    """

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = Field(1, validation_alias=AliasChoices("n_cmpl", "n"))
    temperature: Annotated[float, Field(ge=0, le=10), BeforeValidator(_greedy_if_negative)] = 1.0
    temperature_last: bool = Field(True, description="As in llama.cpp's chain.")
    samplers: Annotated[list[ShortText], at_most(MAX_WORDS)] | None = Field(
        None, description="Those that are not in it are off. Of the order, only the place of the temperature counts."
    )
    logit_bias: Annotated[
        dict[NonNegative, Bias],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_biases_of_ids, json_schema_input_type=_GivenBiases),
    ] = Field({}, description="By token id or text, which stands for its tokens.")
    biased_texts: Annotated[
        dict[ShortText, Bias],
        Field(max_length=MAX_ENCODED),
        BeforeValidator(_biases_of_texts, json_schema_input_type=_GivenBiases),
    ] = Field({}, validation_alias="logit_bias", description="By token id or text, which stands for its tokens.")
    json_schema: Annotated[Any, BeforeValidator(_any_json)] = Field(None, description="An empty one is any JSON.")
    min_keep: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = 0
    lora: Annotated[list[LoraScale], at_most(MAX_WORDS)] = Field([])
    post_sampling_probs: bool = False

    return_tokens: bool = Field(False, description="Streams always have them.")
    timings_per_token: bool = False
    response_fields: Annotated[list[ShortText], at_most(MAX_WORDS)] = Field([])
    sse_ping_interval: Integer | None = Field(None, description="Seconds; -1 for no pings.")

    def without_effect(self) -> list[str]:
        own = {"min_keep": self.min_keep > 0, "t_max_predict_ms": self.t_max_predict_ms > 0}
        return [*super().without_effect(), *(name for name, is_on in own.items() if is_on)]

    def parameters(self) -> SamplingParameters:
        parameters = super().parameters()
        if self.samplers is None:
            return parameters
        off = [field for name in SAMPLERS if name not in self.samplers for field in SAMPLERS[name]]
        cuts = [self.samplers.index(name) for name in CUTS if name in self.samplers]
        last = "temperature" not in self.samplers or self.samplers.index("temperature") > min(cuts, default=-1)
        neutral = {field: getattr(_NEUTRAL, field) for field in off}
        return msgspec.structs.replace(parameters, **neutral, temperature_last=last)


class LlamaCppCompletionRequest(CompletionFields):
    prompt: Prompts


class ExtraFile(RequestModel):
    text: str
    filename: str = "tmp"


class InfillRequest(CompletionFields):
    """What stands between two texts.

    Attributes:
        prompt: goes on from `input_prefix`.
        input_extra: other files, for the model to look at.
    """

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[ExtraFile], at_most(MAX_FILES)] = Field([])
