"""What the JSON schema of a tool says of a part of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from common.parsing.formats.base import Schema

Kind: TypeAlias = Literal["null", "boolean", "integer", "number", "string", "array", "object"]
_Kinds: TypeAlias = frozenset[Kind] | None

_DEPTH: Final = 64  # of schemas within schemas
# Names of types as schemas have them that were not written by the book: those of Python, and of databases.
_KINDS: Final[Mapping[str, frozenset[Kind]]] = {
    "null": frozenset({"null"}),
    "none": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "bool": frozenset({"boolean"}),
    "integer": frozenset({"integer"}),
    "int": frozenset({"integer"}),
    "number": frozenset({"integer", "number"}),
    "float": frozenset({"integer", "number"}),
    "double": frozenset({"integer", "number"}),
    "string": frozenset({"string"}),
    "str": frozenset({"string"}),
    "array": frozenset({"array"}),
    "list": frozenset({"array"}),
    "object": frozenset({"object"}),
    "dict": frozenset({"object"}),
}


def kinds_of(schema: Schema, root: Schema = True) -> frozenset[Kind] | None:
    """The types that a schema allows, "integer" wherever "number" is; None where it does not say.

    Args:
        root: what references in the schema refer to.
    """
    return _kinds_of(schema, root, {}, 0)


def _kinds_of(schema: Any, root: Schema, seen: dict[int, _Kinds], depth: int) -> _Kinds:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return frozenset() if schema is False else None
    if id(schema) not in seen:
        seen[id(schema)] = None  # where it refers to itself, that says nothing
        seen[id(schema)] = _said(schema, root, seen, depth + 1)
    return seen[id(schema)]


def _said(schema: Mapping[str, Any], root: Schema, seen: dict[int, _Kinds], depth: int) -> _Kinds:
    said = [_types(schema.get("type"))]
    if isinstance(values := schema.get("enum"), list):
        said.append(_union(map(_kinds_of_value, values)))
    if "const" in schema:
        said.append(_kinds_of_value(schema["const"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            said.append(_union([_kinds_of(part, root, seen, depth) for part in parts]))
    if isinstance(parts := schema.get("allOf"), list):
        said += [_kinds_of(part, root, seen, depth) for part in parts]
    if isinstance(reference := schema.get("$ref"), str):
        said.append(_kinds_of(_referenced(reference, root), root, seen, depth))
    known = [kinds for kinds in said if kinds is not None]
    if not known:
        return None
    kinds = known[0].intersection(*known[1:])
    return kinds | {"null"} if schema.get("nullable") is True else kinds


def _types(declared: object) -> _Kinds:
    names = declared if isinstance(declared, list) else [declared]
    return _union(_KINDS.get(name.lower()) if isinstance(name, str) else None for name in names)


def _union(parts: Iterable[_Kinds]) -> _Kinds:
    """What one of some schemas allows; None where one of them does not say."""
    allowed = frozenset[Kind]()
    for kinds in parts:
        if kinds is None:
            return None
        allowed |= kinds
    return allowed


def _kinds_of_value(value: object) -> frozenset[Kind]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def names_of(schema: Schema, root: Schema) -> list[str]:
    """The properties of an object that a schema declares, in their order."""
    names: dict[str, None] = {}
    for part in parts_of(schema, root):
        if isinstance(properties := part.get("properties"), Mapping):
            names |= dict.fromkeys(properties)
    return list(names)


def member_of(schema: Schema, root: Schema, name: str) -> Schema:
    """The schema of a property of an object; True where there is none.

    Args:
        root: what references in the schema refer to.
    """
    named: list[Schema] = []
    others: list[Schema] = []
    for part in parts_of(schema, root):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            named.append(properties[name])
        elif isinstance(other := part.get("additionalProperties"), Mapping):
            others.append(other)
    return _any_of(named or others)


def items_of(schema: Schema, root: Schema) -> Schema:
    """The schema of the items of a list; True where there is none, or not one for all."""
    return _any_of([items for part in parts_of(schema, root) if isinstance(items := part.get("items"), Mapping)])


def parts_of(schema: Schema, root: Schema) -> Iterator[Mapping[str, Any]]:
    """A schema, and those it refers to or is made of, each once."""
    pending: list[Any] = [schema]
    seen = set()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(reference := part.get("$ref"), str):
            pending.append(_referenced(reference, root))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(alternatives := part.get(key), list):
                pending.extend(alternatives)


def _any_of(schemas: Sequence[Schema]) -> Schema:
    if len(schemas) > 1:
        return {"anyOf": list(schemas)}
    return schemas[0] if schemas else True


def referenced(reference: str, root: Schema) -> Any:
    """What a reference within a document refers to. Raises `LookupError` where that is nothing."""
    place: Any = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping):
            raise LookupError(reference)
        place = place[name]
    return place


def _referenced(reference: str, root: Schema) -> Any:
    """The same; True, which says nothing, where that is nothing."""
    try:
        return referenced(reference, root)
    except LookupError:
        return True
