"""What a request says about the shape of its answer -> constraints that the engine enforces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar

from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint
from common.grammar import check_constraint, choice_constraint, json_object_constraint
from endpoints.OAI.types.common import GenerationFields, ResponseFormat, StructuredOutputs

T = TypeVar("T")

FORMATS = ("text", "json_object", "json_schema", "regex", "grammar", "choice")
# Each one has a process compile, which may take its time.
_COMPILERS: Final = ThreadPoolExecutor(max_workers=4, thread_name_prefix="constraints")
# Members of OpenAI's object around a schema.
_WRAPPER = frozenset({"name", "description", "schema", "strict"})


async def checked_constraints(fields: GenerationFields) -> list[Constraint]:
    """What the answer must match, all of it at once.

    Raises:
        InvalidRequest: something of it is no schema, pattern or grammar, or cannot be enforced.
    """
    constraints = list(dict.fromkeys(requested_constraints(fields)))
    for constraint in constraints:
        await compiling(partial(check_constraint, constraint))
    return constraints


async def compiling(work: Callable[[], T]) -> T:
    """The result of work that compiles constraints, of which only some is done at a time."""
    return await asyncio.get_running_loop().run_in_executor(_COMPILERS, copy_context().run, work)


def requested_constraints(fields: GenerationFields) -> Iterator[Constraint]:
    """The constraints of every field that asks for one, not compiled yet. Raises `InvalidRequest`."""
    yield from _of_response_format(fields.response_format)
    yield from _of_structured_outputs(fields.structured_outputs)
    # TabbyAPI's own fields are sent empty by front ends that want nothing; a schema elsewhere is meant, even {}.
    if fields.json_schema:
        yield _json_schema(fields.json_schema, "json_schema")
    if fields.guided_json is not None:
        yield _json_schema(fields.guided_json, "guided_json")
    for param in ("regex_pattern", "guided_regex"):
        if pattern := getattr(fields, param):
            yield _regex(pattern, param)
    for param in ("grammar_string", "guided_grammar"):
        if grammar := getattr(fields, param):
            yield _grammar(grammar, param)
    if fields.guided_choice:
        yield choice_constraint(fields.guided_choice, "guided_choice")


def _of_response_format(given: ResponseFormat) -> Iterator[Constraint]:
    path = "response_format"

    def member(name: str) -> object:
        value = getattr(given, name)
        return _needed(given.value if value is None else value, f"{path}.{name}")

    match given.type:
        case "text":
            pass
        case "json_object" | "json":
            # llama.cpp's server and text-generation-inference know a schema here; OpenAI and TabbyAPI mean any object.
            schema = given.value if given.schema_ is None else given.schema_
            yield _json_schema(schema, f"{path}.schema") if schema else json_object_constraint(path)
        case "json_schema":
            schema = member("json_schema") if given.schema_ is None else given.schema_
            yield _json_schema(schema, f"{path}.json_schema", wrapper_expected=True)
        case "regex":
            yield _regex(member("regex"), f"{path}.regex")
        case "grammar":
            yield _grammar(member("grammar"), f"{path}.grammar")
        case "choice":
            yield _choice(member("choice"), f"{path}.choice")
        case "structural_tag":
            raise Unsupported("response_format.type structural_tag is not available here.", param=f"{path}.type")
        case _:
            raise InvalidRequest(
                f"response_format.type must be one of {', '.join(FORMATS)}, not {given.type!r}.", param=f"{path}.type"
            )


def _of_structured_outputs(given: StructuredOutputs) -> Iterator[Constraint]:
    path = "structured_outputs"
    if given.structural_tag is not None:
        raise Unsupported(f"{path}.structural_tag is not available here.", param=f"{path}.structural_tag")
    if given.json_object:
        yield json_object_constraint(f"{path}.json_object")
    if given.json_ is not None:
        yield _json_schema(given.json_, f"{path}.json")
    if given.regex:
        yield _regex(given.regex, f"{path}.regex")
    if given.grammar:
        yield _grammar(given.grammar, f"{path}.grammar")
    if given.choice:
        yield choice_constraint(given.choice, f"{path}.choice")


def _json_schema(given: object, param: str, *, wrapper_expected: bool = False) -> Constraint:
    """Of a schema, JSON of one, or OpenAI's object around one.

    Args:
        wrapper_expected: OpenAI's object belongs here, so a member `schema` is the schema whatever stands beside it;
            elsewhere only where nothing but members of that object does.
    """
    given = _parsed(given, param)
    if isinstance(given, dict) and (_is_wrapper(given) or (wrapper_expected and "schema" in given)):
        param = f"{param}.schema"
        given = _parsed(_needed(given.get("schema"), param), param)
    if not isinstance(given, (dict, bool)):
        raise InvalidRequest(f"{param} must be a JSON schema: an object, or true for any JSON.", param=param)
    try:
        text = json.dumps(given, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from error
    return Constraint(kind="json_schema", text=text, param=param)


def _is_wrapper(given: dict[str, object]) -> bool:
    return given.keys() <= _WRAPPER and given.keys() != {"description"} and bool(given)


def _parsed(given: object, param: str) -> object:
    if not isinstance(given, str):
        return given
    try:
        parsed: object = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}.", param=param) from error
    return parsed


def _regex(given: object, param: str) -> Constraint:
    return Constraint(kind="regex", text=_text(given, param), param=param)


def _grammar(given: object, param: str) -> Constraint:
    text = _text(given, param)
    return Constraint(kind="gbnf" if "::=" in text else "lark", text=text, param=param)


def _text(given: object, param: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{param} must be a string.", param=param)
    return given


def _choice(given: object, param: str) -> Constraint:
    if not isinstance(given, list) or not all(isinstance(choice, str) for choice in given):
        raise InvalidRequest(f"{param} must be a list of strings.", param=param)
    return choice_constraint(given, param)


def _needed(given: T | None, param: str) -> T:
    if given is None:
        raise InvalidRequest(f"{param} is missing.", param=param)
    return given
