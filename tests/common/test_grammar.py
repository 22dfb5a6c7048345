"""What can be enforced is enforced, and what cannot be is refused with a reason."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
from llguidance import LLMatcher

from common import grammar, grammar_compiler
from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint, ConstraintKind
from common.grammar import check_constraint, choice_constraint, json_object_constraint
from common.grammar_compiler import _byte_tokenizer, problem_of, to_llguidance

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def matches(kind: ConstraintKind, constraint: str, text: str, frame: str | None = None) -> bool:
    matcher = LLMatcher(_byte_tokenizer([]), to_llguidance(kind, constraint, frame), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    given = list(text.encode())
    return bool(matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", '{"a": [null]}'], ["", "{"]),
        ({}, ['"a"', "[]"], ["a"]),
        ({"type": "object"}, ["{}", '{"a": 1}'], ["[]", '{"a": 1']),
        ({"type": "object", "properties": {"a": NUMBER}}, ['{"a": 1}', '{"b": ""}'], ['{"a": ""}', '{"\\u0061": ""}']),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]}, ['{"a": "", "b": 1}'], ['{"a": ""}']),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, ['{"x1": 1}', '{"y": ""}'], ['{"x1": ""}']),
        ({"type": "object", "additionalProperties": NUMBER}, ['{"a": 1}'], ['{"a": ""}']),
        ({"type": "object", "maxProperties": 1}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER}, ['{"a": 1}'], ['{"a": ""}']),
        ({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
        ({"type": "array", "prefixItems": [TEXT, NUMBER], "items": False}, ['["a", 1]'], ["[1]", '["a", 1, 2]']),
        ({"items": {"type": "array", "uniqueItems": False}}, ["[[1, 1]]"], ["[1]"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"é😀"', '"\\n"'], ['""', '"abc"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "string", "pattern": "^[^a]$"}, ['"b"'], ['""', '"a"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024"']),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 6}, ["3", "5"], ["2", "6", "3.5"]),
        ({"type": "number", "multipleOf": 0.25}, ["1.50", "0.25"], ["0.30"]),
        ({"enum": [1, "a", None, {"a": [1]}]}, ["1", '"a"', "null", '{"a": [1]}'], ["2"]),
        ({"const": {"b": 1, "a": 2}}, ['{"b": 1, "a": 2}'], ['{"b": 2}']),
        ({"anyOf": [TEXT, NUMBER]}, ["1", '"a"'], ["null"]),
        ({"oneOf": [TEXT, NUMBER]}, ["1", '"a"'], ["null"]),
        ({"allOf": [{"minLength": 2}, TEXT]}, ['"ab"'], ['"a"']),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}, "minLength": 2}, ['"ab"'], ['"a"', "1"]),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
            ["[[], [[]]]"],
            ["[1]"],
        ),
        ({"title": "t", "description": "d", "default": 1, "examples": [1], "$schema": DRAFT, **NUMBER}, ["1"], ['""']),
        ({"type": ["integer", "null"]}, ["1", "null"], ['""']),
    ],
)
def test_schemas_are_enforced(schema: Any, good: list[str], bad: list[str]) -> None:
    text = json.dumps(schema)
    assert problem_of("json_schema", text) is None
    assert [value for value in good if not matches("json_schema", text, value)] == []
    assert [value for value in bad if matches("json_schema", text, value)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "false"),
        ([], "object or a boolean"),
        ({"type": "strange"}, "strange"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": TEXT, "then": TEXT, "else": TEXT}, "else.*if.*then"),
        ({"not": TEXT}, "not"),
        ({"properties": {"a": {"not": TEXT}}}, "not"),
        ({"type": "array", "contains": TEXT}, "contains"),
        ({"dependentSchemas": {"a": TEXT}}, "dependentSchemas"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "minLength"),
        ({"type": "integer", "multipleOf": 0}, "multiple"),
        ({"oneOf": [TEXT, {"minLength": 2}]}, "oneOf"),
        ({"enum": []}, "empty"),
        ({"enum": ["\x01"]}, "control character"),
        ({"properties": {"\x7f": {}}}, "control character"),
        ({"const": {"a": ["\x00"]}}, "control character"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"x-guidance": {"lenient": True}, "not": TEXT}, "not"),
        ({"type": "string", "minLength": "2"}, "minLength"),
    ],
)
def test_what_a_schema_cannot_have_is_named(schema: Any, reason: str) -> None:
    problem = problem_of("json_schema", json.dumps(schema))
    assert problem is not None
    assert re.search(reason, problem), problem


def test_blanks_are_bounded() -> None:
    indented = json.dumps({"a": [1, {"b": 2}]}, indent=4)
    for text in (indented, indented.replace("\n", "\r\n"), '{"a":1}', '{ "a" : 1 }'):
        assert matches("json_schema", "{}", text), text
    for text in ('{\n\n"a": 1}', '{"a":' + " " * 33 + "1}", " {}", "{}\n", '{"a":1,\n' + "\t" * 33 + '"b":1}'):
        assert not matches("json_schema", "{}", text), text


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"\d{3}-\d{4}", ["123-4567"], ["123"]),
        ("regex", "(?i)a/b\n", ["A/b\n"], ["a/b"]),
        ("regex", "", [""], ["a"]),
        ("lark", 'start: "a" b*\nb: /[0-9]/ "x"?', ["a", "a1x2"], ["ax"]),
        ("gbnf", 'root ::= "a" item{2} # twice\nitem ::= [0-9] | "-"', ["a1-"], ["a1"]),
        ("gbnf", 'root ::= "\\u0022\\u005c\\u00e9" [\\u0041-\\u0043] "\\U0001F600"', ['"\\éB😀'], ['"\\éD😀']),
    ],
)
def test_patterns_and_grammars(kind: ConstraintKind, text: str, good: list[str], bad: list[str]) -> None:
    assert problem_of(kind, text) is None
    assert all(matches(kind, text, value) for value in good)
    assert not any(matches(kind, text, value) for value in bad)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?=a)b"),
        ("regex", r"\bfoo\b"),
        ("regex", r"(a)\1"),
        ("regex", "[a-"),
        ("regex", r"[^\s\S]"),
        ("lark", ""),
        ("lark", 'foo: "a"'),
        ("lark", "start: missing"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        ("gbnf", 'x ::= "a"'),
        ("gbnf", "root ::= ("),
        ("gbnf", 'root ::= "\\ud800"'),
        ("gbnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        ("json_schema", "{"),
        ("json_schema", '{"minimum": NaN}'),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    ],
)
def test_what_cannot_be_compiled(kind: ConstraintKind, text: str) -> None:
    assert problem_of(kind, text)


@pytest.mark.parametrize("text", ["start: <|im_start|>", "start: <[3]>", "start: <[100000-100003]>"])
def test_special_tokens_are_for_the_engine_to_judge(text: str) -> None:
    assert problem_of("lark", text) is None


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", json.dumps({"type": "integer"}), "12", "x"),
        ("regex", "[/a]+", "a/", "b"),
        ("lark", 'start: b+\nb: "x" C\nC: /[0-9]/', "x1x2", "x"),
        ("gbnf", 'root ::= item{2}\nitem ::= [0-9] | "\\u00e9"', "1é", "1"),
    ],
)
def test_a_frame_stands_around_every_kind(kind: ConstraintKind, text: str, good: str, bad: str) -> None:
    frame = 'start: "<" b? @answer ">"\nb: /[ \\n]{1,3}/'
    assert problem_of(kind, text, frame) is None
    assert matches(kind, text, f"<{good}>", frame)
    assert matches(kind, text, f"<\n\n {good}>", frame)
    for wrong in (good, f"<{bad}>", f"<{good}", "<>"):
        assert not matches(kind, text, wrong, frame)
    assert problem_of(kind, text, "start: @other") is not None
    with pytest.raises(InvalidRequest, match="p: this"):
        check_constraint(Constraint(kind, text, "p", frame="start: ("))


def test_a_choice_is_one_of_the_texts() -> None:
    choices = ["a", "ab", 'é😀\n"\\', "/x/i", "<b>"]
    constraint = choice_constraint(choices, "p")
    assert all(matches(constraint.kind, constraint.text, choice) for choice in choices)
    assert not matches(constraint.kind, constraint.text, "b")
    with pytest.raises(InvalidRequest):
        choice_constraint([], "p")


def test_a_constraint_is_checked_before_anything_is_generated() -> None:
    check_constraint(json_object_constraint("response_format"))
    check_constraint(Constraint("regex", "a*", "regex_pattern"))
    with pytest.raises(Unsupported, match="json_schema: this JSON schema.*uniqueItems") as unsupported:
        check_constraint(Constraint("json_schema", '{"uniqueItems": true}', "json_schema"))
    assert unsupported.value.param == "json_schema"
    with pytest.raises(InvalidRequest, match="unclosed character class") as invalid:
        check_constraint(Constraint("regex", "[a-", "regex_pattern"))
    assert invalid.value.param == "regex_pattern"
    assert "\n" not in invalid.value.message
    with pytest.raises(InvalidRequest, match="p: this set of tools cannot be used"):
        check_constraint(Constraint("regex", "[a-", "p"), "set of tools")


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(Unsupported, match="characters"):
        check_constraint(Constraint("regex", "a" * (grammar.MOST_CHARACTERS + 1), "p"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        # Each keeps the compiler busy for minutes at least.
        ("json_schema", json.dumps({"allOf": [{**TEXT, "pattern": f".*a.{{{i}}}b"} for i in range(1, 20)]})),
        ("json_schema", json.dumps({"patternProperties": {f"^a{i:04}.*b.{{400}}c": {} for i in range(2000)}})),
    ],
)
def test_a_text_that_keeps_the_compiler_busy_is_refused(
    kind: ConstraintKind, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MOST_SECONDS", 1.0)
    with pytest.raises(Unsupported, match="too complex"):
        check_constraint(Constraint(kind, text, "p"))


def test_a_text_that_brings_the_compiler_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -11, b"", b""))
    with pytest.raises(Unsupported, match="too complex"):
        check_constraint(Constraint("regex", "crash", "p"))


def test_a_text_that_the_engine_would_compile_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MOST_CPU_SECONDS", 0.0)
    assert "too complex" in (problem_of("regex", "a|b") or "")
    monkeypatch.undo()
    lexemes = " & ".join(f"/.*a.{{{i}}}b/" for i in range(1, 14))
    assert "fuel" in (problem_of("lark", f"start: T\nT: {lexemes}") or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {index}" for index in range(5000)]},
        {"type": "object", "properties": {f"property_{index}": TEXT for index in range(300)}},
        {"type": "string", "maxLength": 100_000},
        {"type": "array", "items": TEXT, "maxItems": 100_000},
    ],
)
def test_large_schemas_are_fine(schema: Any) -> None:
    assert problem_of("json_schema", json.dumps(schema)) is None
