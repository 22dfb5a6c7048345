"""Schemas are taken apart into what a value may be."""

from __future__ import annotations

from typing import Any

import pytest

from common.parsing.alternatives import alternatives

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, [{}]),
        (False, []),
        ({"description": "d", "default": 1}, [{}]),
        ({"type": ["string", "null"], "maxLength": 2}, [{**TEXT, "maxLength": 2}, {"type": "null", "maxLength": 2}]),
        ({"anyOf": [TEXT, {"oneOf": [NUMBER, {"type": "null"}]}]}, [TEXT, NUMBER, {"type": "null"}]),
        ({"allOf": [TEXT, {"maxLength": 2}], "title": "t"}, [{**TEXT, "maxLength": 2}]),
        ({"type": ["string", "integer"], "anyOf": [TEXT, {"type": "null"}]}, [TEXT]),
        ({"enum": ["a", 1, None]}, [{**TEXT, "enum": ["a"]}, {"enum": [1, None]}]),
        ({"const": "a"}, [{**TEXT, "enum": ["a"]}]),
        ({**TEXT, "enum": ["a", 1]}, [{**TEXT, "enum": ["a", 1]}]),
        ({**TEXT, "nullable": True}, [TEXT, {"type": "null"}]),
        ({"$ref": "#/$defs/a~1b", "maxLength": 1, "$defs": {"a/b": TEXT}}, [{**TEXT, "maxLength": 1}]),
        ({"anyOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": NUMBER}}, [NUMBER, NUMBER]),
    ],
)
def test_alternatives(schema: Any, expected: list[dict[str, Any]]) -> None:
    assert alternatives(schema) == expected


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/a"}, "nothing"),
        ({"$ref": "https://example.com"}, "nothing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "itself"),
        ({"allOf": [{"maxLength": 1}, {"maxLength": 2}]}, "maxLength"),
        ({"anyOf": TEXT}, "list"),
        ({"allOf": [{"anyOf": [TEXT] * 9}] * 2}, "too many"),
    ],
)
def test_what_cannot_be_taken_apart(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        alternatives(schema)


@pytest.mark.parametrize("last", [False, TEXT])
def test_a_chain_of_references_takes_no_time(last: Any) -> None:
    chain = {f"a{index}": {"anyOf": [{"$ref": f"#/$defs/a{index + 1}"}] * 2} for index in range(60)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a60": last}}
    if last is False:
        assert alternatives(schema) == []
    else:
        with pytest.raises(ValueError, match="too many"):
            alternatives(schema)
