from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.formats.base import Schema, Tool
from common.parsing.schemas import kinds_of, names_of
from common.parsing.values import ArgumentsWriter, convert
from tests.common.parsing.reading import strict

STRING: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("text", ["1.10", "true", "null", '{"a": 1}', "NaN", '"quoted"', "01234", " a\n", "", "None"])
def test_a_string_stays_as_it_is(text: str) -> None:
    assert json.loads(convert(text, STRING)) == text


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", "integer", "5"),
        (" 5\n", "integer", "5"),
        ("5.0", "integer", "5"),
        ("-0.0", "integer", "0"),
        ("1e3", "integer", "1000"),
        ("1e999", "integer", "1e999"),
        ("5.5", "integer", "5.5"),
        ('"5"', "integer", "5"),
        ("123456789012345678901234567890", "integer", "123456789012345678901234567890"),
        ("five", "integer", '"five"'),
        ("5 apples", "integer", '"5 apples"'),
        ("", "integer", '""'),
        ("1.10", "number", "1.10"),
        ("5", "number", "5"),
        ("1E5", "number", "1E5"),
        ("0.1000000000000000055511151231257827", "number", "0.1000000000000000055511151231257827"),
        ("NaN", "number", "null"),
        ("-Infinity", "number", "null"),
        ("true", "boolean", "true"),
        ("True", "boolean", "true"),
        ("FALSE", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("null", "null", "null"),
        ("None", "null", "null"),
        ('["a",  1.0]', "array", '["a",  1.0]'),
        ("['a', True, None]", "array", '["a", true, null]'),
        ("(1, 2)", "array", "[1, 2]"),
        ("a, b", "array", '"a, b"'),
        ('{"a": {"b": [1, "é"]}}', "object", '{"a": {"b": [1, "é"]}}'),
        ("{'a': 'it\\'s'}", "object", '{"a": "it\'s"}'),
        ('"{\\"a\\": 1}"', "object", '{"a": 1}'),
        ('{"a": NaN}', "object", '{"a": null}'),
        ("[1, 2", "array", "[1, 2]"),
        ('{"a": "b', "object", '"{\\"a\\": \\"b"'),
    ],
)
def test_the_declared_type_wins(text: str, schema: str, value: str) -> None:
    assert convert(text, {"type": schema}) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.10", "1.10"),
        (" true\n", "true"),
        ("null", "null"),
        ('{"a":1}', '{"a":1}'),
        ('"a"', '"a"'),
        ("01234", '"01234"'),
        ("NaN", '"NaN"'),
        ("[Infinity]", '"[Infinity]"'),
        ("True", '"True"'),
        ("['a']", "\"['a']\""),
        ("plain\n", '"plain\\n"'),
        ("", '""'),
        ("[" * 5000 + "]" * 5000, json.dumps("[" * 5000 + "]" * 5000)),
        ("9" * 5000, json.dumps("9" * 5000)),
    ],
)
@pytest.mark.parametrize("schema", [True, {}, {"description": "anything"}, False])
def test_without_a_type_what_is_json_is_that(text: str, value: str, schema: Schema) -> None:
    assert convert(text, schema) == value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("null", TEXT_OR_NULL, "null"),
        (" null", TEXT_OR_NULL, '" null"'),
        ("None", TEXT_OR_NULL, '"None"'),
        ('"a"', TEXT_OR_NULL, '"\\"a\\""'),
        ("", TEXT_OR_NULL, '""'),
        ("null", {"type": ["integer", "null"]}, "null"),
        ("None", {"type": "integer", "nullable": True}, "null"),
        ("", {"type": ["integer", "null"]}, "null"),
        ("5", {"type": ["integer", "null"]}, "5"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ("1.5", {"type": ["string", "integer"]}, '"1.5"'),
        ("True", {"type": ["string", "boolean"]}, '"True"'),
        ("5.0", {"type": ["integer", "number"]}, "5.0"),
        ("['a']", {"type": ["string", "array"]}, "\"['a']\""),
        ("5", {"enum": ["5", "6"]}, '"5"'),
        ("5", {"enum": [5, 6]}, "5"),
        ("5", {"const": "5"}, '"5"'),
        ("['1', 2]", {"type": "array", "items": {"type": "string"}}, '["1", "2"]'),
    ],
)
def test_several_types(text: str, schema: Schema, value: str) -> None:
    assert convert(text, schema) == value


def test_references() -> None:
    root = {
        "$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
        "definitions": {"a/b": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}},
    }
    assert convert("5", {"$ref": "#/$defs/name"}, root) == '"5"'
    assert convert("null", {"$ref": "#/definitions/a~1b"}, root) == "null"
    for reference in ("#/$defs/loop", "#/$defs/missing", "#/$defs/name/type/x", "https://example.org/schema", "#"):
        assert convert("5", {"$ref": reference}, root) == "5"


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "number"}, {"integer", "number"}),
        ({"type": "STRING"}, {"string"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "uuid"}, None),
        ({"type": ["string", "uuid"]}, None),
        ({"type": 5}, None),
        ({"type": []}, set()),
        (
            {"enum": [None, True, 1, 1.5, 2.0, "a", [], {}]},
            {"null", "boolean", "integer", "number", "string", "array", "object"},
        ),
        ({"type": "number", "enum": [1, 2]}, {"integer"}),
        ({"oneOf": [{"type": "string"}, {"description": "whatever"}]}, None),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]}, {"string"}),
        ({"anyOf": {"type": "string"}}, None),
        ("string", None),
        (False, set()),
    ],
)
def test_what_a_schema_says_of_types(schema: Any, kinds: set[str] | None) -> None:
    assert kinds_of(schema) == kinds


def test_schemas_that_are_deep_or_wide() -> None:
    deep: Any = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert kinds_of(deep) is None
    root = {"$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 10} for n in range(40)}}
    assert kinds_of({"$ref": "#/$defs/0"}, root) is None


def test_names_of_properties() -> None:
    root = {"properties": {"b": {}, "a": {}}, "allOf": [{"properties": {"c": {}}}, {"properties": None}]}
    assert names_of(root, root) == ["b", "a", "c"]
    assert names_of({}, {}) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)


@given(json_values)
def test_json_keeps_its_spelling(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)):
        assert convert(f" {text}\n") == text


@given(
    st.text() | json_values.map(repr),
    st.sampled_from([True, *({"type": kind} for kind in ("string", "integer", "boolean", "array", "object", "null"))]),
)
def test_whatever_is_written_becomes_strict_json(text: str, schema: Schema) -> None:
    with warnings.catch_warnings(record=True) as warned:
        strict(convert(text, schema))
    assert not warned


def test_half_characters_can_be_encoded() -> None:
    for value in (convert("a\ud83d"), convert('["a\ud83d"]'), convert("\udc00", STRING)):
        assert "\\ud" in value
        value.encode()


def test_arguments_piece_by_piece() -> None:
    tool = Tool("f", {"properties": {"text": STRING, "maybe": TEXT_OR_NULL, "count": {"type": "integer"}}})
    writer = ArgumentsWriter(tool)
    pieces = [writer.key("text")]
    assert writer.is_text()
    assert writer.may_be_text()
    pieces += [writer.begin_text(), writer.text('a "'), writer.text("\n\\"), writer.end_text(), writer.key("count")]
    assert not writer.is_text("a")
    assert not writer.may_be_text()
    pieces += [writer.value("5.0"), writer.key("maybe")]
    assert not writer.is_text("nul")
    assert writer.is_text("nulx")
    pieces += [writer.value("null"), writer.key('"')]
    assert not writer.is_text("a")
    assert writer.may_be_text()
    pieces += [writer.json("[1"), writer.end()]
    assert "".join(piece.text for piece in pieces) == '{"text": "a \\"\\n\\\\", "count": 5, "maybe": null, "\\"": [1]}'


def test_no_arguments() -> None:
    assert ArgumentsWriter(Tool("f", {})).end().text == "{}"
