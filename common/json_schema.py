"""JSON schemas as they are given to llguidance: the one way in which this server has JSON generated."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

# A model that is free to write blanks may do so for ever; this lets it indent.
WHITESPACE: Final = r"[ \t]{1,32}|\r?\n[ \t]{0,32}"
# Without \u, with which a key could be spelled in a second way, past the schema of the first.
ESCAPES: Final = 'nrtbf\\"'
_OPTIONS: Final = {
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": ESCAPES,
    "lenient": False,
    "coerce_one_of": False,
}
_NEEDS_OTHER_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

# Keywords of a JSON schema below which there are schemas: one, a list, or a mapping of them.
SCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties", "not", "contains", "if", "then", "else")
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "maxProperties"})
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def prepare(given: object) -> dict[str, Any]:
    """A schema for llguidance, with the options that hold for all.

    Raises:
        ValueError: it is no schema, or asks for what would not be enforced. What llguidance refuses is left to it.
    """
    if isinstance(given, bool):
        given = {"allOf": [given]}
    if not isinstance(given, Mapping):
        raise ValueError("it must be an object or a boolean")
    try:
        schema: dict[str, Any] = copy.deepcopy(dict(given))
        for part in _schemas(schema):
            _prepare(part)
        json.dumps(schema)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return schema | {"x-guidance": _OPTIONS}


def loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What of a schema is certain to be well-formed and enforceable but for its references. It allows no less."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "type":
                types = value if isinstance(value, list) else [value]
                if types and all(isinstance(name, str) and name in _TYPES for name in types):
                    kept[key] = value
            case "enum":
                if isinstance(value, list) and value:
                    kept[key] = value
            case "const":
                kept[key] = value
            case "$ref":
                if isinstance(value, str):
                    kept[key] = value
            case "required":
                if isinstance(value, list) and all(isinstance(name, str) for name in value):
                    kept[key] = value
            case "properties" | "$defs" | "definitions":
                if isinstance(value, Mapping):
                    kept[key] = {name: _loosened_part(part) for name, part in value.items()}
            case "items" | "additionalProperties":
                if isinstance(value, (Mapping, bool)):
                    kept[key] = _loosened_part(value)
            case "anyOf" | "oneOf":
                # Whatever is one of some is any of them.
                if isinstance(value, list) and value:
                    kept["anyOf"] = [_loosened_part(part) for part in value]
            case _:
                if (key in _COUNTS and type(value) is int and value >= 0) or (
                    key in _BOUNDS and type(value) in (int, float)
                ):
                    kept[key] = value
    if "patternProperties" in schema:
        kept.pop("additionalProperties", None)  # it speaks of the others
    if kept.get("properties"):
        kept.pop("anyOf", None)  # mostly which of the properties belong together
    return kept


def _loosened_part(schema: object) -> dict[str, Any] | bool:
    if isinstance(schema, bool):
        return schema
    return loosened(schema) if isinstance(schema, Mapping) else {}


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    """A schema and all those inside it."""
    pending = [root]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        pending += [schema[key] for key in SCHEMA_KEYWORDS if key in schema]
        for key in SCHEMA_LIST_KEYWORDS:
            if isinstance(schema.get(key), list):
                pending += schema[key]
        for key in SCHEMA_MAP_KEYWORDS:
            if isinstance(schema.get(key), dict):
                pending += schema[key].values()


def _prepare(schema: dict[str, Any]) -> None:
    """Leave out keywords that ask for nothing, which llguidance refuses, and refuse what it does not see.

    Generators of schemas write such keywords: zod's records have property names of type string.
    """
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    for text in _strings([schema.get("enum"), schema.get("const"), schema.get("required"), *_keys(schema)]):
        if _NEEDS_OTHER_ESCAPE.search(text):
            raise ValueError(f"the control character in {json.dumps(text)} is not supported")
    least, required = schema.get("minProperties"), schema.get("required", [])
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if (
        isinstance(least, int)
        and isinstance(required, list)
        and not closed
        and least > len(set(map(str, required))) + 1
    ):
        raise ValueError(
            f"minProperties {least} cannot be enforced, since an object may repeat a key. Name the properties in "
            "required, or set additionalProperties to false"
        )


def _strings(value: Any) -> Iterator[str]:
    """Those in a JSON value."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += [*item, *item.values()]


def _keys(schema: dict[str, Any]) -> list[str]:
    properties = schema.get("properties")
    return list(properties) if isinstance(properties, dict) else []
