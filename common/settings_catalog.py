"""What the models of `config_models` say about themselves: the one place that reflects on them."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from common.config_models import Allowed, NoEffect, Section, Settings

_TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One key of one section.

    Attributes:
        allowed: the values that it takes, in words; completes "must be ...".
        collection: "list" or "mapping" where the value is one, else None.
    """

    section: str
    key: str
    default: Any
    description: str
    allowed: str
    collection: Literal["list", "mapping"] | None
    no_effect: NoEffect | None

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"TABBY_{self.section}_{self.key}".upper()

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return "--" + self.key.replace("_", "-")

    def is_ignored(self, value: Any) -> bool:
        """Whether setting it to `value` asks for something that will not happen."""
        if self.no_effect is None:
            return False
        if self.no_effect.when is not None:
            return self.no_effect.when(value)
        return bool(value != self.default)


def _describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """The values of a type, in words."""
    limits = list(metadata)
    for item in limits:
        if isinstance(item, Allowed):
            return item.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *limits])
    if origin in (Union, types.UnionType):
        return _describe(next(item for item in arguments if item is not type(None)), limits)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin is list:
        return f"a list; each item {_describe(arguments[0])}"
    if origin is dict:
        return "a mapping"
    return ", ".join([_TYPE_WORDS[annotation], *_describe_limits(limits)])


def _describe_limits(limits: Iterable[Any]) -> Iterator[str]:
    for limit in limits:
        match limit:
            case Ge(ge=bound):
                yield f"{bound} or more"
            case Gt(gt=bound):
                yield f"greater than {bound}"
            case Le(le=bound):
                yield f"{bound} or less"
            case Lt(lt=bound):
                yield f"less than {bound}"
            case MultipleOf(multiple_of=factor):
                yield f"a multiple of {factor}"


def _collection(annotation: Any) -> Literal["list", "mapping"] | None:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _collection(get_args(annotation)[0])
    if origin is list:
        return "list"
    return "mapping" if origin is dict else None


def _setting(section: str, key: str, field: FieldInfo) -> Setting:
    return Setting(
        section=section,
        key=key,
        default=field.get_default(),
        description=" ".join((field.description or "").split()),
        allowed=_describe(field.annotation, field.metadata),
        collection=_collection(field.annotation),
        no_effect=next((item for item in field.metadata if isinstance(item, NoEffect)), None),
    )


SECTIONS: Mapping[str, type[Section]] = {name: type(getattr(Settings(), name)) for name in Settings.model_fields}
CATALOG: Mapping[str, Mapping[str, Setting]] = {
    section: {key: _setting(section, key, field) for key, field in model.model_fields.items()}
    for section, model in SECTIONS.items()
}
ALL_SETTINGS: Sequence[Setting] = tuple(setting for section in CATALOG.values() for setting in section.values())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the nearest of the known words, led by a space; empty where none is near."""
    spellings = {item.lower(): item for item in known}
    nearest = difflib.get_close_matches(word.lower(), spellings, n=1)
    return f" Did you mean {spellings[nearest[0]]}?" if nearest else ""


def unknown_keys(section: str, keys: Iterable[str], known: Iterable[str], source: str) -> Iterator[str]:
    """A warning for each key that is not known, with the nearest one that is."""
    known = list(known)
    for key in keys:
        if key not in known:
            yield f"Unknown setting {section}.{key} in {source} is ignored.{did_you_mean(key, known)}"


def explain_refusal(error: ValidationError, section: str, values: Mapping[str, Any]) -> dict[str, str]:
    """For each key that a section's model refused: what was given and what is allowed."""
    problems = {}
    for detail in error.errors(include_url=False):
        key = str(detail["loc"][0])
        given = repr(values.get(key))
        given = given if len(given) <= 100 else given[:97] + "..."
        problems[key] = f"{section}.{key} is {given}, but must be {CATALOG[section][key].allowed}."
    return problems
