"""Sampling parameters: as the engine takes them, as requests give them, and presets that stand in for requests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeGuard, TypeVar

import msgspec
from loguru import logger
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from common.errors import InvalidRequest, NotFound, SettingsError
from common.limits import (
    MAX_ANSWERS,
    MAX_BANNED_STRINGS,
    MAX_BIASES,
    MAX_BREAKERS,
    MAX_LISTED_TOKENS,
    MAX_LOOP_WINDOW,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    ShortText,
    at_most,
)
from common.names import is_plain_name
from common.settings_catalog import did_you_mean
from common.yaml_file import read_mapping

PRESET_DIR = Path(__file__).resolve().parent.parent / "sampler_overrides"
# What the engine's kernels can count to; a larger number would fail there, or on the way.
LARGEST = 2**31 - 1


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters of one request; the defaults are neutral.

    The names are TabbyAPI's, the order of the steps is in `backends/exllamav3/sampler.py`.
    """

    temperature: float = 1.0  # 0 is greedy
    temperature_last: bool = False  # apply the temperature after the truncating samplers
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_range: int = -1  # tokens; negative: the whole context
    repetition_decay: int = 0  # tokens over which a penalty fades out past the range
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0  # tokens; 0: the whole context
    dry_sequence_breakers: list[str] = []
    adaptive_target: float = 1.0  # below 1: adaptive-P
    adaptive_decay: float = 0.9
    logit_bias: dict[int, float] = {}
    banned_tokens: list[int] = []
    allowed_tokens: list[int] = []  # empty: all
    ban_eos_token: bool = False
    loop_detect_window: int = 800  # tokens; below 3: off


# --- fields of a request ------------------------------------------------------------------------------------------


def _strings(value: object) -> object:
    """One string is a list of one. An empty one would be found everywhere, and means none."""
    if isinstance(value, str):
        value = [value]
    return [item for item in value if item != ""] if isinstance(value, list) else value


def is_token_id(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LARGEST


def _token_ids(value: object) -> object:
    """Token ids may come as one string, separated by commas; whatever is no number in it is dropped, as T does."""
    if not isinstance(value, str):
        return value
    return [int(piece) for piece in (part.strip() for part in value.split(",")) if piece.isdecimal()]


def _sequence_breakers(value: object) -> object:
    """A list may come as JSON in a string, with or without its brackets, or as plain words between commas."""
    if not isinstance(value, str):
        return value
    listed = value.lstrip().startswith("[")
    try:
        return json.loads(value if listed else f"[{value}]")
    except (ValueError, RecursionError) as error:
        if listed:
            raise ValueError("a string must hold a JSON list of strings") from error
        return [word for word in map(str.strip, value.split(",")) if word]


def _stop(value: object) -> object:
    if isinstance(value, (str, int)):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) or is_token_id(item) for item in value):
        raise ValueError("must be a string, or a list of strings and token ids")
    return [item for item in value if item != ""]


def _logit_bias(value: object) -> object:
    """llama.cpp's server also takes pairs, and false for never. A token whose bias is null has none."""
    if isinstance(value, list):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise ValueError("must map token ids to biases, or be a list of such pairs")
        value = {str(token): NEVER if bias is False else bias for token, bias in value}
    return {token: bias for token, bias in value.items() if bias is not None} if isinstance(value, dict) else value


def _seed(value: object) -> object:
    return None if value == -1 else value  # as front ends say "any"


Integer: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIds: TypeAlias = Annotated[
    list[NonNegative],
    at_most(MAX_LISTED_TOKENS),
    BeforeValidator(_token_ids, json_schema_input_type=str | list[NonNegative]),
]
BannedStrings: TypeAlias = Annotated[
    list[ShortText], at_most(MAX_BANNED_STRINGS), BeforeValidator(_strings, json_schema_input_type=str | list[str])
]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
# Far beyond what logits need, and far below what turns them into infinities and the answer into nothing.
Bias: TypeAlias = Annotated[float, Field(ge=-1000, le=1000)]
NEVER = -1000.0


def _named(*names: str) -> AliasChoices:
    return AliasChoices(*names)


class RequestModel(BaseModel):
    """A JSON object of a request: an explicit null is the same as an absent field, unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: object) -> object:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values


class ForeignSamplers(RequestModel):
    """Samplers that other engines have and this one lacks. The defaults turn them off; so does 0 or false."""

    smoothing_factor: float = 0.0
    top_a: float = 0.0
    tfs: float = Field(1.0, validation_alias=_named("tfs", "tfs_z"))
    typical: float = Field(1.0, validation_alias=_named("typical", "typical_p"))
    skew: float = 0.0
    mirostat_mode: int = Field(0, validation_alias=_named("mirostat_mode", "mirostat"))
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.3
    min_temp: float = Field(1.0, validation_alias=_named("min_temp", "dynatemp_low"))
    max_temp: float = Field(1.0, validation_alias=_named("max_temp", "dynatemp_high"))
    temp_exponent: float = Field(1.0, validation_alias=_named("temp_exponent", "dynatemp_exponent"))
    dynatemp_range: float = 0.0
    top_n_sigma: float = Field(-1.0, validation_alias=_named("top_n_sigma", "nsigma"))
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    penalty_alpha: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_repetition_penalty: float = 1.0
    guidance_scale: float = 1.0
    num_beams: int = 1
    use_beam_search: bool = False

    def without_effect(self) -> list[str]:
        """Names of those that a request turns on."""
        named = [name for name in ForeignSamplers.model_fields if name not in _NO_SWITCH and self._is_on(name)]
        return [*named, "min_temp", "max_temp"] if self.min_temp != self.max_temp else named

    def _is_on(self, name: str) -> bool:
        value = getattr(self, name)
        return bool(value) and value != ForeignSamplers.model_fields[name].default


# They say how another one works, or, as the bounds of a temperature, do something only together.
_NO_SWITCH = frozenset({"mirostat_tau", "mirostat_eta", "min_temp", "max_temp"})


class SamplingFields(ForeignSamplers):
    """What a request may say about sampling and length, under any of the names that clients use.

    Where a request gives one field under several names, the name that stands first counts.
    """

    max_tokens: Annotated[Integer, Field(ge=-1)] = Field(
        0,
        validation_alias=_named("max_completion_tokens", "max_tokens", "max_length", "max_new_tokens", "n_predict"),
        description="0 or -1: all that fit",
    )
    min_tokens: NonNegative = Field(0, validation_alias=_named("min_tokens", "min_length"))
    stop: Annotated[
        list[ShortText | int],
        at_most(MAX_STOPS),
        BeforeValidator(_stop, json_schema_input_type=str | int | list[str | int]),
    ] = Field(
        [],
        validation_alias=_named("stop", "stop_sequence", "stopping_strings"),
        description="strings and token ids",
    )
    banned_strings: BannedStrings = Field([], validation_alias=_named("banned_strings", "bad_words"))
    token_healing: bool = False
    seed: Annotated[Seed | None, BeforeValidator(_seed)] = Field(None, description="-1: any")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    add_bos_token: bool | None = Field(None, validation_alias=_named("add_bos_token", "add_special_tokens"))

    temperature: float = Field(1.0, ge=0, le=10)
    temperature_last: bool = False
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    top_p: Fraction = 1.0
    min_p: Fraction = 0.0
    xtc_probability: Fraction = 0.0
    xtc_threshold: Fraction = 0.1
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, validation_alias=_named("repetition_penalty", "rep_pen", "repeat_penalty")
    )
    frequency_penalty: Bias = 0.0
    presence_penalty: Bias = 0.0
    penalty_range: Integer = Field(
        -1,
        validation_alias=_named(
            "penalty_range", "repetition_range", "repetition_penalty_range", "rep_pen_range", "repeat_last_n"
        ),
    )
    repetition_decay: NonNegative = 0
    dry_multiplier: Annotated[Bias, Field(ge=0)] = 0.0
    dry_base: Annotated[Bias, Field(ge=0)] = 1.75
    dry_allowed_length: NonNegative = 2
    dry_range: Annotated[Integer, Field(ge=-1)] = Field(0, validation_alias=_named("dry_range", "dry_penalty_last_n"))
    dry_sequence_breakers: Annotated[
        list[ShortText],
        at_most(MAX_BREAKERS),
        BeforeValidator(_sequence_breakers, json_schema_input_type=str | list[str]),
    ] = []
    adaptive_target: float = 1.0
    adaptive_decay: Fraction = 0.9
    logit_bias: Annotated[
        dict[NonNegative, Bias],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_logit_bias, json_schema_input_type=dict[NonNegative, Bias] | list[list[Any]]),
    ] = {}
    banned_tokens: TokenIds = Field([], validation_alias=_named("banned_tokens", "custom_token_bans"))
    allowed_tokens: TokenIds = Field([], validation_alias=_named("allowed_tokens", "allowed_token_ids"))
    ban_eos_token: bool = Field(False, validation_alias=_named("ban_eos_token", "ignore_eos"))
    loop_detect_window: Annotated[int, Field(ge=0, le=MAX_LOOP_WINDOW)] = 800

    @property
    def stop_strings(self) -> list[str]:
        return [item for item in self.stop if isinstance(item, str)]

    @property
    def stop_tokens(self) -> list[int]:
        return [item for item in self.stop if isinstance(item, int)]

    def parameters(self) -> SamplingParameters:
        """What of this goes to the sampler.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        if 0 < self.max_tokens < self.min_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        values = {name: getattr(self, name) for name in SamplingParameters.__struct_fields__}
        values["top_k"] = max(0, self.top_k)
        values["dry_range"] = max(0, self.dry_range)
        if self.adaptive_target < 0:  # no probability: how front ends of other servers turn it off
            values["adaptive_target"] = SamplingParameters().adaptive_target
        return SamplingParameters(**values)


# --- presets ------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=SamplingFields)


class PresetFields(SamplingFields):
    """What a preset can give a value to, in the limits that requests have: sampling, and these."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    json_schema: Any = None
    regex_pattern: str | None = None
    grammar_string: str | None = None


class Override(RequestModel):
    """How a preset treats one field.

    Attributes:
        override: the value.
        force: use it whatever the request says; else only where the request says nothing.
        additive: of a list: put it in front of the request's.
    """

    override: Any = None
    force: bool = False
    additive: bool = False


Overrides: TypeAlias = Mapping[str, Override]  # by field


class SamplerPresets:
    """The presets of a folder, and the one in force for every request.

    A value that a request could not give is refused before anything of the preset is in force.

    Attributes:
        selected: name of the preset in force; None without one, or with overrides that were given directly.
        overrides: those in force.
    """

    def __init__(self, directory: Path = PRESET_DIR) -> None:
        self.selected: str | None = None
        self.overrides: Overrides = {}
        self._directory = directory
        self._of_models: dict[str, Overrides] = {}

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.yml"))

    def select(self, name: str) -> None:
        """Put the preset `name` in force.

        Raises:
            NotFound: there is no such preset.
            InvalidRequest: its file is broken, or holds a value that no request could give.
        """
        self.overrides = self._read(name, "preset")
        self.selected = name

    def replace(self, overrides: object) -> None:
        """Put the given overrides in force instead of a preset. Raises `InvalidRequest` and then changes nothing."""
        self.overrides = _checked(overrides, "overrides", "overrides")
        self.selected = None

    def clear(self) -> None:
        self.overrides = {}
        self.selected = None

    def read_for_model(self, name: str | None) -> None:
        """Read the preset of a model that is about to be loaded. Raises as `select()` does."""
        if name:
            self._of_models[name] = self._read(name, "sampler_preset")

    def of_model(self, name: str | None) -> Overrides:
        """The overrides of a model's preset, as they were when such a model was last loaded."""
        if name and name not in self._of_models:
            self.read_for_model(name)
        return self._of_models[name] if name else {}

    def apply(self, fields: F, model_preset: str | None = None) -> F:
        """The request as the overrides make it; a new object where they change anything.

        Args:
            model_preset: `sampler_preset` of the model that answers; its parameters win over those in force for all.
        """
        changes: dict[str, Any] = {}
        for name, override in {**self.overrides, **self.of_model(model_preset)}.items():
            if name not in type(fields).model_fields:
                continue
            given = getattr(fields, name)
            if override.force or name not in fields.model_fields_set:
                changes[name] = override.override
            elif override.additive and isinstance(given, list):
                changes[name] = [*override.override, *given]
        return fields.model_copy(update=changes) if changes else fields

    def _read(self, name: str, param: str) -> Overrides:
        file_name = f"{name}.yml"
        path = self._directory / file_name
        source = f"The sampler preset {name!r}"
        try:
            content = read_mapping(path, source) if is_plain_name(file_name) and os.path.isfile(path) else None
        except SettingsError as error:
            raise InvalidRequest(str(error), param=param) from error
        if content is None:
            raise NotFound(f"There is no sampler preset {name!r}. Available: {', '.join(self.names())}.", param=param)
        return _checked(content, source, param)


def _checked(overrides: object, source: str, param: str) -> Overrides:
    """Overrides under the fields' own names, with values of the right types; what is unknown is logged and left out."""
    if not isinstance(overrides, Mapping):
        raise InvalidRequest(f"{source} must map parameters to overrides.", param=param)
    checked: dict[str, Override] = {}
    for given, entry in overrides.items():
        name = _FIELD_OF_NAME.get(given)
        if name is None:
            nearest = did_you_mean(str(given), _FIELD_OF_NAME)
            logger.warning("{}: there is no parameter {!r}; it is ignored.{}", source, given, nearest)
            continue
        try:
            override = Override.model_validate(entry)
            if override.override is None:
                continue
            value = getattr(PresetFields.model_validate({name: override.override}), name)
        except ValidationError as error:
            raise InvalidRequest(f"{source}: {given}: {_problem(error)}", param=param) from error
        if name in checked:
            raise InvalidRequest(f"{source}: {given} is another name of {name}, which is there too.", param=param)
        if name == "n" and override.force:
            logger.warning("{}: n decides how many answers a client has to expect, so it is not forced.", source)
        checked[name] = override.model_copy(update={"override": value, "force": override.force and name != "n"})
    _check_together(checked, source, param)
    return checked


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    if problem["type"] == "model_type":
        return 'it must be an object such as {"override": 0.5, "force": true}.'
    return f"{problem['msg'].removeprefix('Value error, ')}."


def _check_together(overrides: Overrides, source: str, param: str) -> None:
    """Refuse what would have every request refused that leaves these fields out."""
    try:
        PresetFields.model_validate({name: override.override for name, override in overrides.items()}).parameters()
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error.message}", param=param) from error


def _names(field: str) -> list[str]:
    alias = PresetFields.model_fields[field].validation_alias
    return [field, *(str(choice) for choice in alias.choices)] if isinstance(alias, AliasChoices) else [field]


# Every name that a request may give a field under -> the field.
_FIELD_OF_NAME: Mapping[str, str] = {name: field for field in PresetFields.model_fields for name in _names(field)}
