"""What an answer must look like -> a Lark grammar in the model's own dialect, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from loguru import logger

from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint
from common.grammar import check_constraint
from common.json_schema import loosened, prepare
from common.parsing import lark
from common.parsing.alternatives import alternatives
from common.parsing.dialect import CallRules, Dialect
from common.parsing.formats.base import Schema, Tool
from common.parsing.lark import ANY

T = TypeVar("T")

_DEFINITIONS: Final = ("$defs", "definitions")
_NAME: Final = "[A-Za-z_][A-Za-z0-9_-]{0,63}"  # of what is not declared, in what every format can read
# Where a backtick stands directly before a string, it is a mention of it.
_UNQUOTED: Final = f"({ANY}[^`])?"
_QUOTES: Final = "`\"'"
# Keywords that say what cannot be enforced where the arguments of an object, or a text, are written bare.
_BEYOND_OBJECTS: Final = (
    *("anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"),
)
_BEYOND_TEXTS: Final = ("not", "if", "$dynamicRef")
_OF_VALUES: Final = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "items"}
    | {"prefixItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems"}
    | {"maxItems", "pattern", "format", "minLength", "maxLength", "not", "if"}
)

_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
}
# Where a schema allows text and such a value, text may not begin as the value does, with which it might be confused.
_FIRST: Final = {"array": r"\[", "object": r"\{", "integer": "0-9-", "number": "0-9-"}

# Finding out which of many tools cannot be enforced takes a check of each; later ones are not enforced then.
_MOST_SECONDS: Final = 20.0

_SCHEMA: Final = "JSON schema"
_SCHEMAS: Final = "set of JSON schemas"


class Property(NamedTuple):
    name: str
    schema: Schema
    required: bool


class GrammarWriter:
    """Writes the rules of one grammar. Its methods return Lark expressions, adding rules where they need any.

    Args:
        special_tokens: ids of the tokens that the tokenizer calls special, by their text. Text cannot match those.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._names: dict[str, str] = {}  # of rules and terminals, by what they are
        self._by_key: dict[str, str] = {}

    # --- text -----------------------------------------------------------------------------------------------------

    def literal(self, text: str) -> str:
        """Exactly this text, control tokens in it as the tokens."""
        return " ".join(self._pieces(text)) or '""'

    def any_text(self, but: Collection[str] = (), *, not_first: Collection[str] = (), unquoted: bool = False) -> str:
        """Any text, maybe none, in which none of some strings stands.

        Args:
            not_first: strings with which it may not begin, blanks aside.
            unquoted: the strings in `but` may stand directly after a backtick.
        """
        return self._terminal(lark.regex(ANY, but=self._without(but, not_first, unquoted)))

    def text_until(
        self, end: str, but: Collection[str] = (), *, not_first: Collection[str] = (), unquoted: bool = False
    ) -> str:
        """Any text up to the first place where `end` stands, and that.

        Args:
            but: strings that may not stand before it.
            not_first: strings with which it may not begin, blanks aside.
            unquoted: `end` and those in `but` count only where no backtick stands directly before them.
        """
        forbidden = [string for string in but if string not in end]
        if not self._split(end)[1]:
            forbidden.append(end)
        text = lark.regex(_UNQUOTED if unquoted else ANY, but=self._without(forbidden, not_first, unquoted))
        return self._ended(text, end)

    def quoted_until(self, end: str) -> str:
        """Any text up to the first place where `end` stands but not in quotes, and that."""
        if self._split(end)[1]:
            return self.text_until(end)
        tag = lark.escaped(end)
        quoted = "|".join(f"{quote}{tag}([^{quote}]{ANY})?" for quote in _QUOTES)
        return self._ended(lark.regex(ANY, but=[f"({ANY}[^{_QUOTES}])?{tag}{ANY}", f"{ANY}({quoted})"]), end)

    def _ended(self, text: str, end: str) -> str:
        """Text, and its end as far as that is text in one terminal: no terminal gives back what it has matched."""
        terminal = self._terminal(text)
        head, rest = self._split(end)
        if head:
            terminal = self._terminal(f"{terminal} {lark.string(head)}")
        return f"{terminal} {self.literal(rest)}" if rest else terminal

    def blanks(self, most: int = 8) -> str:
        """Whitespace, maybe none."""
        return self._terminal(rf"/[ \t\r\n]{{0,{most}}}/")

    # --- values ---------------------------------------------------------------------------------------------------

    def json(self, schema: Schema) -> str:
        """JSON that is valid under a schema.

        Raises:
            ValueError: the schema asks for what cannot be enforced. Not all of that is found here.
        """
        return self.rule(f"%json {json.dumps(prepare(schema))}")

    def string_until(self, schema: Schema, end: str, but: Collection[str] = ()) -> str:
        """The bare text of a value that a schema calls a string, and `end`. Enumerations, patterns and lengths hold.

        Args:
            but: strings that may not stand in the text, as they may be taken for its end, too. Nor may `end` without
                the blanks around it.

        Raises:
            ValueError: the schema asks for what cannot be enforced of bare text.
        """
        parts = alternatives(schema)
        texts = [self._bare(part, end, but) for part in parts if part.get("type", "string") == "string"]
        if not texts:
            raise ValueError("it allows no string")
        return self.one_of(texts)

    def value_until(self, schema: Schema, end: str, but: Collection[str] = ()) -> str:
        """A value as `values.convert()` reads it, and `end`: bare text where the schema allows a string, else JSON.

        Args:
            but: see `string_until()`.

        Raises:
            ValueError: the schema asks for what cannot be enforced.
        """
        parts = alternatives(schema)
        if any(not part.keys() & _OF_VALUES for part in parts):
            return self._bare({}, end, but)
        texts = [part for part in parts if part.get("type") == "string"]
        others = [part for part in parts if part.get("type") != "string"]
        if any(part.keys() == {"type"} for part in texts):
            # All that is read as a value of these types is one, and everything else is text.
            others = [part for part in others if part.keys() != {"type"}]
        types = {part.get("type") for part in others}
        first = "".join(characters for name, characters in _FIRST.items() if name in types)
        written = [self._bare(part, end, but, first) for part in texts]
        if others:
            written.append(f"{self.json(_with_definitions({'anyOf': others}, schema))} {self.literal(end)}")
        if not written:
            raise ValueError("it allows no value")
        return self.one_of(written)

    def _bare(self, schema: Mapping[str, Any], end: str, but: Collection[str], not_first: str = "") -> str:
        """Text of one alternative, and `end`.

        Args:
            not_first: characters with which it may not begin, as they stand in a class of a pattern.
        """
        if beyond := [keyword for keyword in _BEYOND_TEXTS if keyword in schema]:
            raise ValueError(f"{beyond[0]} cannot be enforced of text")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return self._one_of_values(_checked(values, list, "enum"), schema, end)
        patterns = []
        if "pattern" in schema:
            patterns.append(lark.containing(_checked(schema["pattern"], str, "pattern")))
        if "format" in schema:
            format = _checked(schema["format"], str, "format")
            if format not in _FORMATS:
                raise ValueError(f"the format {json.dumps(format)} cannot be enforced of text")
            patterns.append(_FORMATS[format])
        has_length = "minLength" in schema or "maxLength" in schema
        if not_first:
            not_first += r"\s"
        elif has_length:
            not_first = r"\n"  # which some formats take for layout, so that it would not count
        if has_length or not_first:
            patterns.append(_of_length(schema.get("minLength", 0), schema.get("maxLength"), not_first))
        forbidden = [string for string in (end.strip(), *but) if not self._split(string)[1]]
        without = lark.without(forbidden)
        if without is None:
            text = lark.regex(*(patterns or [ANY]), but=self._without(forbidden, (), unquoted=False))
        else:
            text = lark.regex(*patterns, without)
        return self._ended(text, end)

    def _one_of_values(self, values: Sequence[object], schema: Mapping[str, Any], end: str) -> str:
        if other := schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            raise ValueError(f"an enumeration beside {min(other)} is not supported")
        texts = [value for value in values if isinstance(value, str)]
        if held := [text for text in texts if end.strip() in text]:
            raise ValueError(f"the value {json.dumps(held[0])} cannot be told from what ends it")
        return self.one_of([self.literal(text + end) for text in texts])

    # --- objects --------------------------------------------------------------------------------------------------

    def parameters(self, parameters: Mapping[str, Any], write: Callable[[str, Schema], str]) -> str:
        """The arguments of a call, one by one in the order of their declaration; optional ones may be left out.

        Where none are declared, and where the schema says so, any number of others may follow.

        Args:
            write: from a Lark expression for a name, and the schema of its value, an expression for an argument.

        Raises:
            ValueError: the schema cannot be enforced argument by argument.
        """
        written = []
        for name, schema, required in self.properties(parameters):
            argument = write(self.literal(name), schema)
            written.append(argument if required else f"({argument})?")
        if others := self.others(parameters):
            written.append(f"({write(*others)})*")
        return " ".join(written) or '""'

    def others(self, parameters: Mapping[str, Any]) -> tuple[str, Schema] | None:
        """A Lark expression for the name, and the schema, of properties that are not declared; None if none may be.

        They may be where the schema says so, and where none are declared.
        """
        declared = self.properties(parameters)
        root = _referenced(parameters)
        schema = root.get("additionalProperties", not declared)
        if schema is False:
            return None
        name = self._terminal(lark.regex(_NAME, but=[lark.escaped(name) for name, _, _ in declared]))
        return name, _with_definitions(schema, root)

    def properties(self, parameters: Mapping[str, Any]) -> list[Property]:
        """The declared properties of an object, in their order; see `parameters()`, which is easier to use.

        References within `parameters` are carried along, so that each schema stands on its own.

        Raises:
            ValueError: the schema says more of the object than its properties.
        """
        root = _referenced(parameters)
        for keyword in _BEYOND_OBJECTS:
            if keyword in root:
                raise ValueError(f"{keyword} at its top cannot be enforced in the form that this model calls tools in")
        declared, required = root.get("properties", {}), root.get("required", [])
        if not isinstance(declared, Mapping):
            raise ValueError("properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("required must be a list of strings")
        others = root.get("additionalProperties", True)
        if others is False and (missing := [name for name in required if name not in declared]):
            raise ValueError(f"it requires {missing[0]!r}, which it does not allow")
        return [
            Property(name, _with_definitions(declared.get(name, others), root), name in required)
            for name in dict.fromkeys([*declared, *required])
        ]

    # --- the grammar ----------------------------------------------------------------------------------------------

    def one_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def rule(self, expression: str) -> str:
        """A name for an expression that is long or used more than once."""
        return self._names.setdefault(expression, f"r{len(self._names)}")

    def rule_for(self, key: str, write: Callable[[], str]) -> str:
        """A name for the expression of something that has a key, written once however often it is asked for."""
        if key not in self._by_key:
            self._by_key[key] = self.rule(write())
        return self._by_key[key]

    def text(self, start: str) -> str:
        """The grammar, with `start` as what an answer is."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._names.items()), ""])

    def _terminal(self, body: str) -> str:
        return self._names.setdefault(body, f"T{len(self._names)}")

    # --- control tokens -------------------------------------------------------------------------------------------

    def _pieces(self, text: str) -> Iterator[str]:
        position = 0
        for match in self._special.finditer(text):
            if match.start() > position:
                yield lark.string(text[position : match.start()])
            yield f"<[{self._special_tokens[match.group()]}]>"
            position = match.end()
        if position < len(text):
            yield lark.string(text[position:])

    def _split(self, text: str) -> tuple[str, str]:
        """A text before its first control token, and from that on."""
        match = self._special.search(text)
        start = match.start() if match else len(text)
        return text[:start], text[start:]

    def _without(self, but: Collection[str], not_first: Collection[str], unquoted: bool) -> list[str]:
        """Patterns of texts that are not meant. Those with control tokens cannot be."""

        def any_of(strings: Collection[str]) -> str:
            return "|".join(lark.escaped(string) for string in sorted(strings) if not self._split(string)[1])

        patterns = []
        if found := any_of(but):
            patterns.append(f"{_UNQUOTED if unquoted else ANY}({found}){ANY}")
        if found := any_of(not_first):
            patterns.append(rf"\s*({found}){ANY}")
        return patterns


def _checked(value: object, type: type[T], keyword: str) -> T:
    """The value of a keyword. Raises `ValueError` for one of the wrong type."""
    if not isinstance(value, type):
        raise ValueError(f"{keyword} is of the wrong type")
    return value


def _referenced(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an object, or the one that it refers to."""
    if "$ref" not in parameters:
        return parameters
    found = alternatives(parameters)
    if len(found) != 1:
        raise ValueError("a reference at its top must be to an object")
    return {**found[0], **{key: parameters[key] for key in _DEFINITIONS if key in parameters}}


def _of_length(least: object, most: object, not_first: str) -> str:
    """A pattern of texts of some length that do not begin with some characters."""
    if not (isinstance(least, int) and (most is None or isinstance(most, int)) and 0 <= least <= (most or least)):
        raise ValueError("minLength and maxLength must be numbers, the first not above the second")
    if most == 0:
        return ""
    rest = f"[^{not_first}](?s:.{{{max(least - 1, 0)},{'' if most is None else most - 1}}})"
    return rest if least else f"({rest})?"


def _with_definitions(schema: Schema, root: Schema) -> Schema:
    if isinstance(schema, bool) or isinstance(root, bool) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}


# --- whole answers ------------------------------------------------------------------------------------------------


def answer_constraints(
    dialect: Dialect,
    constraints: Sequence[Constraint],
    calls: CallRules | None,
    *,
    in_thought: bool,
    special_tokens: Mapping[str, int],
) -> list[Constraint]:
    """What the engine has to enforce, of the whole answer as the model writes it.

    Everything in it has been checked by `check_constraint()`. Blocks as that does.

    The schemas of strict tools are enforced. Those of others are too where a call is required, as far as they can be.

    Args:
        constraints: of the text for the user, see `GenerationRequest.constraints`. Thoughts before it are free.
        calls: what has to hold of calls of tools; None where none may be made, or where they are free and there are no
            constraints.

    Raises:
        InvalidRequest: the schema of a tool that is to be enforced is wrong.
        Unsupported: it asks for what cannot be enforced.
    """
    if calls is not None:
        if not calls.enforced and not constraints:
            return []
        enforced = [tool if tool.strict or calls.required else tool._replace(parameters={}) for tool in calls.tools]
        calls = calls._replace(tools=[_with_object(tool, tool.parameters) for tool in enforced])
    elif not constraints or dialect.end_of_thought is None:
        return list(constraints)
    framing = _Framing(dialect, constraints, in_thought, special_tokens)
    try:
        return framing.checked(calls)
    except InvalidRequest:
        if calls is None:
            raise
    calls = calls._replace(tools=_enforceable(framing, calls.tools))
    try:
        return framing.checked(calls)
    except InvalidRequest as error:
        logger.info("The arguments of tools that are not strict are not enforced, only that one is called: {}", error)
    tools = [tool if tool.strict else _with_object(tool, {}) for tool in calls.tools]
    return framing.checked(calls._replace(tools=tools))


def _enforceable(framing: _Framing, tools: Sequence[Tool]) -> list[Tool]:
    """The tools with what of their schemas can be enforced.

    Raises:
        InvalidRequest: that of a strict one cannot.
    """
    started = monotonic()
    enforceable = []
    for tool in tools:
        try:
            framing.check(tool)
        except InvalidRequest as error:
            if tool.strict:
                raise
            logger.info("Of the arguments of the tool {}, not all is enforced: {}", tool.name, error)
            try:
                tool = _with_object(tool, loosened(tool.parameters))
                framing.check(tool)
            except (InvalidRequest, RecursionError):
                tool = _with_object(tool, {})
        if monotonic() - started > _MOST_SECONDS:
            if tool.strict:
                raise Unsupported(
                    f"{tool.param}: the schemas of the tools take too long to compile together. Send fewer or simpler "
                    "strict ones.",
                    param=tool.param,
                )
            tool = _with_object(tool, {})
        enforceable.append(tool)
    return enforceable


def _with_object(tool: Tool, parameters: Mapping[str, Any]) -> Tool:
    """The tool with other parameters. Arguments are an object even where the schema does not say so."""
    return tool._replace(parameters={**parameters, "type": "object"})


class _Framing:
    """Puts what an answer must match into the frame of a dialect."""

    def __init__(
        self,
        dialect: Dialect,
        constraints: Sequence[Constraint],
        in_thought: bool,
        special_tokens: Mapping[str, int],
    ) -> None:
        self._dialect = dialect
        self._constraints = constraints
        self._in_thought = in_thought
        self._special_tokens = special_tokens

    def checked(self, calls: CallRules | None) -> list[Constraint]:
        answer = bool(self._constraints) and not (calls is not None and calls.required)
        frame = self._frame(calls, answer=answer, param="tools")
        if not answer:
            constraint = Constraint("lark", frame, "tools")
            check_constraint(constraint, _SCHEMAS)
            return [constraint]
        framed = [msgspec.structs.replace(constraint, frame=frame) for constraint in self._constraints]
        for constraint in framed:
            check_constraint(constraint)
        return framed

    def check(self, tool: Tool) -> None:
        """Raise `InvalidRequest` where the arguments of a tool cannot be enforced."""
        calls = CallRules([tool], required=True, many=False)
        frame = self._frame(calls, answer=False, param=tool.param)
        check_constraint(Constraint("lark", frame, tool.param), _SCHEMA)

    def _frame(self, calls: CallRules | None, *, answer: bool, param: str) -> str:
        grammar = GrammarWriter(self._special_tokens)
        try:
            return grammar.text(self._dialect.frame(grammar, calls, answer=answer, in_thought=self._in_thought))
        except ValueError as error:
            raise Unsupported(f"{param}: this {_SCHEMA} cannot be used: {error}.", param=param) from error
        except RecursionError as error:
            raise Unsupported(f"{param}: this {_SCHEMA} is nested too deeply.", param=param) from error
