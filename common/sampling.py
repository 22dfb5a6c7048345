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
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from common.errors import InvalidRequest, NotFound

PRESET_DIR = Path(__file__).resolve().parent.parent / "sampler_overrides"
MAX_TOP_LOGPROBS = 20
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


def _listed(value: object) -> object:
    return [value] if isinstance(value, (str, int)) else value


def is_token_id(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LARGEST


def _token_ids(value: object) -> object:
    """Token ids may come as one string, separated by commas; whatever is no number in it is dropped, as T does."""
    if not isinstance(value, str):
        return value
    return [int(piece) for piece in (part.strip() for part in value.split(",")) if piece.isdecimal()]


def _sequence_breakers(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value if value.lstrip().startswith("[") else f"[{value}]"
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a string must hold a JSON list of strings") from error


def _stop(value: object) -> object:
    value = _listed(value)
    if not isinstance(value, list) or not all(isinstance(item, str) or is_token_id(item) for item in value):
        raise ValueError("must be a string, or a list of strings and token ids")
    return [item for item in value if item != ""]


Integer: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIds: TypeAlias = Annotated[list[NonNegative], BeforeValidator(_token_ids)]
Strings: TypeAlias = Annotated[list[str], BeforeValidator(_listed)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
# Far beyond what logits need, and far below what turns them into infinities and the answer into nothing.
Bias: TypeAlias = Annotated[float, Field(ge=-1000, le=1000)]


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


class SamplingFields(RequestModel):
    """What a request may say about sampling and length, under any of the names that clients use.

    The fields of the last group are recognised but have no counterpart in the engine.
    """

    max_tokens: Annotated[Integer, Field(ge=-1)] = Field(
        0,
        validation_alias=_named("max_tokens", "max_completion_tokens", "max_length"),
        description="0 or -1: all that fit",
    )
    min_tokens: NonNegative = Field(0, validation_alias=_named("min_tokens", "min_length"))
    stop: Annotated[list[str | int], BeforeValidator(_stop)] = Field(
        [], validation_alias=_named("stop", "stop_sequence"), description="strings and token ids"
    )
    banned_strings: Strings = []
    token_healing: bool = False
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    add_bos_token: bool | None = None

    temperature: float = Field(1.0, ge=0, le=10)
    temperature_last: bool = False
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    top_p: Fraction = 1.0
    min_p: Fraction = 0.0
    xtc_probability: Fraction = 0.0
    xtc_threshold: Fraction = 0.1
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, validation_alias=_named("repetition_penalty", "rep_pen")
    )
    frequency_penalty: Bias = 0.0
    presence_penalty: Bias = 0.0
    penalty_range: Integer = Field(
        -1,
        validation_alias=_named("penalty_range", "repetition_range", "repetition_penalty_range", "rep_pen_range"),
    )
    repetition_decay: NonNegative = 0
    dry_multiplier: Annotated[Bias, Field(ge=0)] = 0.0
    dry_base: Annotated[Bias, Field(ge=0)] = 1.75
    dry_allowed_length: NonNegative = 2
    dry_range: Annotated[Integer, Field(ge=-1)] = Field(0, validation_alias=_named("dry_range", "dry_penalty_last_n"))
    dry_sequence_breakers: Annotated[list[str], BeforeValidator(_sequence_breakers)] = []
    adaptive_target: float = 1.0
    adaptive_decay: Fraction = 0.9
    logit_bias: dict[NonNegative, Bias] = {}
    banned_tokens: TokenIds = Field([], validation_alias=_named("banned_tokens", "custom_token_bans"))
    allowed_tokens: TokenIds = Field([], validation_alias=_named("allowed_tokens", "allowed_token_ids"))
    ban_eos_token: bool = Field(False, validation_alias=_named("ban_eos_token", "ignore_eos"))
    loop_detect_window: NonNegative = 800

    smoothing_factor: float = 0.0
    top_a: float = 0.0
    tfs: float = 1.0
    typical: float = Field(1.0, validation_alias=_named("typical", "typical_p"))
    skew: float = 0.0
    mirostat_mode: int = Field(0, validation_alias=_named("mirostat_mode", "mirostat"))
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.3
    min_temp: float = Field(1.0, validation_alias=_named("min_temp", "dynatemp_low"))
    max_temp: float = Field(1.0, validation_alias=_named("max_temp", "dynatemp_high"))
    temp_exponent: float = Field(1.0, validation_alias=_named("temp_exponent", "dynatemp_exponent"))

    @property
    def stop_strings(self) -> list[str]:
        return [item for item in self.stop if isinstance(item, str)]

    @property
    def stop_tokens(self) -> list[int]:
        return [item for item in self.stop if isinstance(item, int)]

    def without_effect(self) -> list[str]:
        """Names of the samplers that are switched on here and do not exist in the engine."""
        names = [name for name in _UNAVAILABLE if getattr(self, name) != type(self).model_fields[name].default]
        return [*names, "dynatemp"] if self.min_temp != self.max_temp else names

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
        return SamplingParameters(**values)


_UNAVAILABLE = ("smoothing_factor", "top_a", "tfs", "typical", "skew", "mirostat_mode", "temp_exponent")


# --- presets ------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=SamplingFields)


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


class SamplerPresets:
    """The preset in force, for every request and model. A value that a request could not give is refused here too.

    Attributes:
        selected: name of the preset in force; None without one, or with overrides that were given directly.
        overrides: field -> override in force.
    """

    def __init__(self, directory: Path = PRESET_DIR) -> None:
        self.selected: str | None = None
        self.overrides: dict[str, Override] = {}
        self._directory = directory

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.yml"))

    def select(self, name: str) -> None:
        """Put the preset `name` in force.

        Raises:
            NotFound: there is no such preset.
            InvalidRequest: its file is broken, or holds a value that no request could give.
        """
        path = self._directory / f"{name}.yml"
        if path.name != f"{name}.yml" or not os.path.isfile(path):
            raise NotFound(
                f"There is no sampler preset {name!r}. Available: {', '.join(self.names())}.", param="preset"
            )
        try:
            content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")) or {}
        except YAMLError as error:
            raise InvalidRequest(f"The sampler preset {name!r} is not valid YAML: {error}", param="preset") from error
        self.replace(content, source=f"The sampler preset {name!r}")
        self.selected = name

    def replace(self, overrides: object, *, source: str = "overrides") -> None:
        """Put the given overrides in force instead of a preset. Raises `InvalidRequest` and then changes nothing."""
        self.overrides = _checked(overrides, source)
        self.selected = None

    def clear(self) -> None:
        self.overrides = {}
        self.selected = None

    def apply(self, fields: F) -> F:
        """The request as the overrides make it; a new object where they change anything."""
        changes: dict[str, Any] = {}
        for name, override in self.overrides.items():
            given = getattr(fields, name)
            if override.force or name not in fields.model_fields_set:
                changes[name] = override.override
            elif override.additive and isinstance(given, list):
                changes[name] = [*override.override, *given]
        return fields.model_copy(update=changes) if changes else fields


def _checked(overrides: object, source: str) -> dict[str, Override]:
    if not isinstance(overrides, Mapping):
        raise InvalidRequest(f"{source} must map parameters to overrides.", param="overrides")
    checked: dict[str, Override] = {}
    for name, entry in overrides.items():
        if name not in SamplingFields.model_fields:
            logger.warning("{}: there is no sampling parameter {!r}; it is ignored", source, name)
            continue
        try:
            override = Override.model_validate(entry)
            if override.override is None:
                continue
            value = getattr(SamplingFields.model_validate({name: override.override}), name)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise InvalidRequest(f"{source}: {name}: {problem}.", param=f"overrides.{name}") from error
        checked[name] = override.model_copy(update={"override": value})
    return checked
