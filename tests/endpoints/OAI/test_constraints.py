"""Every way to ask for the shape of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint
from common.grammar import choice_constraint, json_object_constraint
from endpoints.OAI.types.common import GenerationFields
from endpoints.OAI.utils.constraints import FORMATS, requested_constraints
from tests.endpoints.OAI.test_chat import chat
from tests.endpoints.running import RunningServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'


def asked(**fields: object) -> list[Constraint]:
    return list(requested_constraints(GenerationFields.model_validate(fields)))


def response_format(type: str, **members: object) -> dict[str, object]:
    return {"response_format": {"type": type, **members}}


def schema(param: str, value: object = SCHEMA) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(value), param=param)


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        value = {"not": value}
    return value


WRAPPED = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (response_format("json_object"), json_object_constraint("response_format")),
        (response_format("json"), json_object_constraint("response_format")),
        (response_format("json_object", schema={}), json_object_constraint("response_format")),
        (response_format("json_object", schema=SCHEMA), schema("response_format.schema")),
        (response_format("json", value=SCHEMA), schema("response_format.schema")),
        (response_format("json_schema", json_schema={"name": "n", "strict": True, "schema": SCHEMA}), schema(WRAPPED)),
        (response_format("json_schema", json_schema={"schema": SCHEMA}), schema(WRAPPED)),
        (response_format("json_schema", json_schema={"schema": SCHEMA, "x-extra": 1}), schema(WRAPPED)),
        (response_format("json_schema", json_schema={"name": "n", "schema": {}}), schema(WRAPPED, {})),
        (response_format("json_schema", json_schema={"name": "n", "schema": True}), schema(WRAPPED, True)),
        (response_format("json_schema", json_schema=SCHEMA), schema("response_format.json_schema")),
        (response_format("json_schema", schema=SCHEMA), schema("response_format.json_schema")),
        (response_format("json_schema", json_schema=json.dumps(SCHEMA)), schema("response_format.json_schema")),
        (response_format("regex", regex="a+"), Constraint("regex", "a+", "response_format.regex")),
        (response_format("regex", pattern="a+"), Constraint("regex", "a+", "response_format.regex")),
        (response_format("regex", value="a+"), Constraint("regex", "a+", "response_format.regex")),
        (response_format("grammar", grammar=GBNF), Constraint("gbnf", GBNF, "response_format.grammar")),
        (response_format("grammar", grammar=LARK), Constraint("lark", LARK, "response_format.grammar")),
        (response_format("choice", choice=["a", "b"]), choice_constraint(["a", "b"], "response_format.choice")),
        (response_format("choice", choices=["a", "b"]), choice_constraint(["a", "b"], "response_format.choice")),
        ({"json_schema": SCHEMA}, schema("json_schema")),
        ({"json_schema": {"name": "n", "schema": SCHEMA}}, schema("json_schema.schema")),
        ({"json_schema": {"properties": {}, "schema": 1}}, schema("json_schema", {"properties": {}, "schema": 1})),
        ({"json_schema": json.dumps(SCHEMA)}, schema("json_schema")),
        ({"guided_json": {}}, schema("guided_json", {})),
        ({"regex_pattern": "a+"}, Constraint("regex", "a+", "regex_pattern")),
        ({"regex": "a+"}, Constraint("regex", "a+", "regex_pattern")),
        ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
        ({"grammar_string": GBNF}, Constraint("gbnf", GBNF, "grammar_string")),
        ({"grammar": GBNF}, Constraint("gbnf", GBNF, "grammar_string")),
        ({"ebnf": GBNF}, Constraint("gbnf", GBNF, "grammar_string")),
        ({"guided_grammar": LARK}, Constraint("lark", LARK, "guided_grammar")),
        ({"guided_choice": ["a", "b"]}, choice_constraint(["a", "b"], "guided_choice")),
        ({"structured_outputs": {"json": SCHEMA}}, schema("structured_outputs.json")),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, schema("structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, json_object_constraint("structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"grammar": LARK}}, Constraint("lark", LARK, "structured_outputs.grammar")),
        ({"structured_outputs": {"choice": ["a"]}}, choice_constraint(["a"], "structured_outputs.choice")),
    ],
)
def test_what_asks_for_a_shape(fields: dict[str, object], expected: Constraint) -> None:
    assert asked(**fields) == [expected]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        response_format("text"),
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"json_schema": {}, "regex_pattern": "", "grammar_string": ""},  # as TabbyAPI's front ends send them
        {"json_schema": "", "guided_choice": [], "structured_outputs": {}},
    ],
)
def test_what_asks_for_none(fields: dict[str, object]) -> None:
    assert asked(**fields) == []


def test_all_hold_at_once() -> None:
    fields = {"regex_pattern": "a+", "grammar_string": LARK, "json_schema": SCHEMA, **response_format("json_object")}
    assert [constraint.kind for constraint in asked(**fields)[1:]] == ["json_schema", "regex", "lark"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (response_format("xml"), "response_format.type", ", ".join(FORMATS)),
        (response_format("json_schema"), "response_format.json_schema", "missing"),
        (response_format("json_schema", json_schema={"name": "n"}), WRAPPED, "missing"),
        (response_format("json_schema", json_schema=[1]), "response_format.json_schema", "must be a JSON schema"),
        (response_format("json_schema", json_schema="{"), "response_format.json_schema", "not valid JSON"),
        (response_format("regex"), "response_format.regex", "missing"),
        (response_format("regex", value={}), "response_format.regex", "string"),
        (response_format("choice", value="a"), "response_format.choice", "list of strings"),
        ({"json_schema": [1]}, "json_schema", "must be a JSON schema"),
        ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
        ({"json_schema": nested(5000)}, "json_schema", "nested too deeply"),
    ],
)
def test_what_cannot_be_asked_for(fields: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        asked(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [response_format("structural_tag"), {"structured_outputs": {"structural_tag": "x"}}])
def test_what_is_not_there(fields: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match="structural_tag"):
        asked(**fields)


def test_the_engine_gets_them(server: RunningServer) -> None:
    chat(server, {"messages": [{"role": "user", "content": "x"}], "n": 2, **response_format("regex", regex="a+")})
    for request in server.engine.history()[-2:]:
        assert request.constraints == [Constraint("regex", "a+", "response_format.regex")]
    server.http.post("/v1/completions", json={"prompt": "x", "grammar_string": GBNF, "regex_pattern": "a"})
    assert [constraint.kind for constraint in server.engine.history()[-1].constraints] == ["regex", "gbnf"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (response_format("json_schema", json_schema={"schema": {"type": "nonsense"}}), WRAPPED),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"regex_pattern": "(a"}, "regex_pattern"),
        ({"grammar_string": "start: nothing"}, "grammar_string"),
        ({"grammar_string": "root ::= ("}, "grammar_string"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_anything_is_generated(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    asked = len(server.engine.history())
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, **fields}
    response = server.http.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(server.engine.history()) == asked
