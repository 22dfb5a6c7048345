"""A schema of one value -> the kinds of value that it allows, each a schema of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from common.parsing.formats.base import Schema
from common.parsing.schemas import referenced

_COMBINING: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "nullable", "$defs", "definitions"})
_ANNOTATIONS: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_MOST: Final = 64  # alternatives; more are not worth a grammar


def alternatives(schema: Schema) -> list[dict[str, Any]]:
    """Schemas of one type each, or of none, of which a value has to match any. References at their top are resolved.

    Raises:
        ValueError: they cannot be told apart like that.
    """
    return [part for whole in _Alternatives(schema).of(schema) for part in _by_type(whole)]


class _Alternatives:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._of_references: dict[str, list[dict[str, Any]] | None] = {}  # None while they are looked for

    def of(self, schema: object) -> list[dict[str, Any]]:
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        parts = [[{key: value for key, value in schema.items() if key not in _COMBINING | _ANNOTATIONS}]]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._of_reference(reference))
        parts += [self.of(part) for part in _list(schema, "allOf")]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                parts.append([one for part in _list(schema, key) for one in self.of(part)])
        merged: list[dict[str, Any]] = [{}]
        for part in parts:
            both = [_merged(one, other) for one, other in itertools.product(merged, part)]
            merged = [one for one in both if one is not None]
            if len(merged) > _MOST:
                raise ValueError("it has too many alternatives")
        if schema.get("nullable") is True:
            merged.append({"type": "null"})
        return merged

    def _of_reference(self, reference: str) -> list[dict[str, Any]]:
        if reference not in self._of_references:
            self._of_references[reference] = None
            self._of_references[reference] = self.of(_referenced(reference, self._root))
        found = self._of_references[reference]
        if found is None:
            raise ValueError(f"{reference} refers to itself")
        return found


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Both at once; None where nothing can match both."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if one[key] == other[key]:
            continue
        if key != "type":
            raise ValueError(f"two values of {key} at once are not supported")
        both = [name for name in _types(one[key]) if name in _types(other[key])]
        if not both:
            return None
        merged["type"] = both
    return merged


def _by_type(schema: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if "type" in schema:
        return [{**schema, "type": name} for name in _types(schema["type"])]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return [schema]
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    return [
        *([{**rest, "type": "string", "enum": texts}] if texts else []),
        *([{**rest, "enum": others}] if others else []),
    ]


def _types(declared: object) -> list[str]:
    names: list[Any] = declared if isinstance(declared, list) else [declared]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("type must be a string or a list of strings")
    return names


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key, [])
    if not isinstance(parts, list):
        raise ValueError(f"{key} must be a list")
    return parts


def _referenced(reference: str, root: Schema) -> Any:
    try:
        return referenced(reference, root)
    except LookupError as error:
        raise ValueError(f"{reference} refers to nothing") from error
