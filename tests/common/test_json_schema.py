"""Schemas are given to llguidance in one way, and nothing that is loosened asks for more than before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.grammar_compiler import problem_of
from common.json_schema import loosened, prepare


def test_preparing_leaves_what_is_given_alone() -> None:
    given = {"properties": {"a": {"type": "array", "uniqueItems": False}}, "x-guidance": {"lenient": True}}
    copy = json.loads(json.dumps(given))
    prepared = prepare(given)
    assert given == copy
    assert prepared["properties"] == {"a": {"type": "array"}}
    assert prepared["x-guidance"]["lenient"] is False
    assert prepare(True)["allOf"] == [True]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "pattern": "(?=a)", "format": "iri", "maxLength": 3}, {"type": "string", "maxLength": 3}),
        ({"type": "any", "title": "t"}, {}),
        ({"type": ["integer", "null"], "minimum": 1, "multipleOf": 0}, {"type": ["integer", "null"], "minimum": 1}),
        ({"oneOf": [{"type": "integer"}, {"not": {}}]}, {"anyOf": [{"type": "integer"}, {}]}),
        ({"items": {"type": "integer"}, "uniqueItems": True}, {"items": {"type": "integer"}}),
        ({"items": [{"type": "integer"}]}, {}),
        ({"minItems": "2", "maxItems": -1, "minLength": True}, {}),
        (
            {"properties": {"a": {"required": True, "type": "integer"}}, "required": ["a"], "anyOf": [{"not": {}}]},
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ),
        ({"patternProperties": {"^a": {"(": 1}}, "additionalProperties": False}, {}),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}, "enum": [], "const": 1},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}, "const": 1},
        ),
        (
            {"additionalProperties": False, "properties": {"a": True}},
            {"additionalProperties": False, "properties": {"a": True}},
        ),
    ],
)
def test_only_what_is_certain_is_kept(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loosened(schema) == expected
    assert problem_of("json_schema", json.dumps(expected)) is None
