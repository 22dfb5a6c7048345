"""What a grammar lets a model write is what the parser reads as calls that keep to the schemas, and nothing else."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common import grammar
from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint
from common.grammar_compiler import LIMITS, problem_of, to_llguidance
from common.parsing.answer import AnswerParser
from common.parsing.dialect import CallRules, Dialect, ReadOptions
from common.parsing.formats.base import Call, Schema, Tool, ToolFormat, Tools
from common.parsing.formats.registry import FORMATS, format_named
from common.parsing.glimmer import GlimmerDialect
from common.parsing.grammar import GrammarWriter, answer_constraints
from common.parsing.harmony import HarmonyDialect
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, Content, NoCall, Piece, Reading
from common.parsing.scanner import Scanner
from common.parsing.tags import TagDialect

THINK = ("<think>", "</think>")
EOS = "<eos>"


class Vocabulary:
    """The 256 bytes, some longer tokens, and special ones."""

    def __init__(self, special: Iterable[str] = (), longer: Iterable[str] = ()) -> None:
        self.special = {text: 256 + index for index, text in enumerate([EOS, *dict.fromkeys(special)])}
        self.longer = [text for text in dict.fromkeys(longer) if len(text) > 1 and text not in self.special]
        texts = [*self.special, *self.longer]
        # What `TokenizerWrapper` looks for.
        self.eos_token_id = self.special[EOS]
        self.bos_token_id = None
        self.tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in texts]
        self.special_token_ids = list(self.special.values())
        self._special = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))))
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        parts = re.split(f"({self._special.pattern})", text)
        return [token for part in parts for token in ([self.special[part]] if part in self.special else part.encode())]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode()

    def choice(self, mask: int, chance: random.Random) -> int:
        """A token of a mask that has one besides the end. Longer ones are likelier, and bytes that are no ASCII come
        last."""
        allowed = [token for token in range(len(self.tokens)) if mask >> token & 1]
        longer = [token for token in allowed if token > 256]
        letters = [token for token in allowed if token == 10 or 32 <= token < 127]
        first, second = (longer, letters) if chance.random() < 0.5 else (letters, longer)
        return chance.choice(first or second or allowed[:1])

    @property
    def ids(self) -> dict[str, int]:
        """Of the special tokens."""
        return {text: token for text, token in self.special.items() if text != EOS}


PLAIN = Vocabulary()


@lru_cache(maxsize=64)
def compiled(constraint: Constraint, vocabulary: Vocabulary) -> LLMatcher:
    grammar = to_llguidance(constraint.kind, constraint.text, constraint.frame)
    matcher = LLMatcher(vocabulary.tokenizer, grammar, limits=LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matcher_of(constraint: Constraint, vocabulary: Vocabulary = PLAIN) -> LLMatcher:
    return compiled(constraint, vocabulary).deep_copy()


def accepts(constraints: Sequence[Constraint], text: str, vocabulary: Vocabulary = PLAIN) -> bool:
    tokens = vocabulary.encode(text)
    matchers = [matcher_of(constraint, vocabulary) for constraint in constraints]
    return all(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting() for matcher in matchers)


def matches(expression: str, writer: GrammarWriter, text: str, vocabulary: Vocabulary = PLAIN) -> bool:
    return accepts([Constraint("lark", writer.text(expression), "p")], text, vocabulary)


def pieces_of(dialect: Dialect, text: str, tools: Iterable[Tool], *, in_thought: bool = False) -> list[Piece]:
    parser = AnswerParser(dialect, ReadOptions(Tools(tools), in_thought, calls_in_thoughts=False))
    return [*parser.feed(text), *parser.end("complete")]


def calls_in(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case CallEnd(complete):
                assert complete
    return calls


def content_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are checked without a process for each, except in tests of that."""
    monkeypatch.setattr(grammar, "_problem", lru_cache(lambda *given: problem_of(*given) or ""))


# --- texts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", 'é "x"\n\t\\n 😀 /x/i', "\x00\x7f", "<tool>\n", "<tool><tool>a", "<tool"])
def test_a_literal_is_the_text_and_its_control_tokens(text: str) -> None:
    vocabulary = Vocabulary(["<tool>"])
    writer = GrammarWriter(vocabulary.ids)
    assert matches(writer.literal(text), writer, text, vocabulary)
    assert not matches(writer.literal(text), writer, text + "a", vocabulary)
    if "<tool>" in text:
        matcher = matcher_of(Constraint("lark", writer.text(writer.literal(text)), "p"), vocabulary)
        assert matcher.try_consume_tokens(list(text.encode())) < len(text.encode())


@pytest.mark.parametrize("special", [[], ["</t>"], ["t>"], ["</"]])
def test_text_ends_at_the_first_end(special: list[str]) -> None:
    vocabulary = Vocabulary(special)
    writer = GrammarWriter(vocabulary.ids)
    expression = f'{writer.text_until("</t>")} "!"'
    for text in ("</t>!", "a\n<</t>!", "é /t \\ </t>!"):
        assert matches(expression, writer, text, vocabulary), text
    for text in ("</t>", "a</t>b</t>!", "a!"):
        assert not matches(expression, writer, text, vocabulary), text


def test_text_without_some_strings() -> None:
    writer = GrammarWriter({})
    expression = writer.any_text(["<a>", "[b]"], not_first=["{"], unquoted=True)
    for text in ("", "a<", "a `<a>` b", "a { b"):
        assert matches(expression, writer, text), text
    for text in ("<a>", "x[b]y", " \n{", "`[b][b]"):
        assert not matches(expression, writer, text), text


@pytest.mark.parametrize("special", [[], ["<t>"], ["t>"]])
def test_a_mention_in_backticks_ends_no_text(special: list[str]) -> None:
    vocabulary = Vocabulary(special)
    writer = GrammarWriter(vocabulary.ids)
    expression = f'{writer.text_until("<t>", ["[o]"], unquoted=True)} "!"'
    assert matches(expression, writer, "a `x` [ <t>!", vocabulary)
    assert not matches(expression, writer, "a [o] <t>!", vocabulary)
    assert not matches(expression, writer, "a `<t>!", vocabulary)
    if not special:
        assert matches(expression, writer, "a `<t>` `[o]` <t>!", vocabulary)


def test_a_closing_tag_in_quotes_is_text() -> None:
    writer = GrammarWriter({})
    expression = f'{writer.quoted_until("</t>")} "!"'
    for text in ("</t>!", "a `</t>` b</t>!", "'</t>'</t>!", '"</t>!', "`</t>!"):
        assert matches(expression, writer, text), text
    for text in ("a `</t>` b!", "a</t>`!</t>!", "a`</t>'</t>!"):
        assert not matches(expression, writer, text), text


# --- values -------------------------------------------------------------------------------------------------------

END = "\n</p>\n"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["", "a\n", "1", '"x"'], ["a</p>b"]),
        ({"type": "string"}, ["", "a\n\n", "</p", " a/b"], ["a</p>b", "\n</p>\n"]),
        ({"type": "string", "enum": ["a", 'b "c"', 3]}, ["a", 'b "c"'], ["3", "c", ""]),
        ({"const": "x"}, ["x"], ["y", '"x"']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀\n"], ["a", "abcd"]),
        ({"type": "string", "pattern": "b+/"}, ["abb/c", "b/"], ["b", "a"]),
        ({"type": "string", "pattern": "^[a-c/|]|x|y{2}$"}, ["/z", "|", "axa", "ayy"], ["zyyz", "z"]),
        ({"type": "string", "pattern": "^(ab|cd)$", "maxLength": 5}, ["ab", "cd"], ["abc", "xab"]),
        ({"type": "string", "pattern": "\\^\\$[$^]"}, ["a^$$"], ["^$"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["1.2.3", "256.1.1.1"]),
        ({"type": "integer", "minimum": 3}, ["3", "12"], ["2", "x", "3.5"]),
        ({"type": "boolean"}, ["true", "false"], ["True", ""]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"]),
        ({"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "integer"}]}, ["a", "5"], ["b", "5.5"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, ["ab", "7"], ["77", " 12"]),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ["a [", "[1, 2]"],
            ['["a"]', " [x"],
        ),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": "x"}', "a"]),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string", "enum": ["a"]}}}, ["a"], ["b"]),
        (
            {"type": "array", "items": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string", "enum": ["a"]}}},
            ['["a"]'],
            ['["b"]'],
        ),
        ({"allOf": [{"type": "string"}, {"maxLength": 1}], "description": "d"}, ["a"], ["ab"]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ["a", "null"], ["b"]),
    ],
)
@pytest.mark.parametrize("special", [[], ["</p>"], ["p>"]])
def test_values_keep_to_their_schema(schema: Schema, good: list[str], bad: list[str], special: list[str]) -> None:
    vocabulary = Vocabulary(special)
    writer = GrammarWriter(vocabulary.ids)
    expression = f'{writer.value_until(schema, END)} "!"'
    for text in good:
        assert matches(expression, writer, f"{text}{END}!", vocabulary), text
    for text in bad:
        assert not matches(expression, writer, f"{text}{END}!", vocabulary), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "no value"),
        ({"type": "string", "format": "iri"}, "iri"),
        ({"type": "string", "pattern": "(^a|b)"}, "anchor"),
        ({"type": "string", "pattern": "a^b"}, "anchor"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "string", "enum": ["a</p>"]}, "cannot be told"),
        ({"type": "string", "enum": ["a"], "maxLength": 3}, "enumeration"),
        ({"$ref": "#/$defs/missing"}, "nothing"),
        ({"$ref": "#"}, "itself"),
        ({"allOf": [{"maxLength": 1}, {"maxLength": 2}]}, "maxLength"),
        ({"type": "string", "pattern": []}, "pattern"),
        ({"type": "string", "format": {}}, "format"),
        ({"type": "string", "enum": "ab"}, "enum"),
        ({"type": "string", "minLength": "2"}, "minLength"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "minLength"),
        ({"type": {}}, "type"),
    ],
)
def test_what_cannot_be_enforced_of_a_value_is_said(schema: Schema, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GrammarWriter({}).value_until(schema, END)


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({}, ["", "a=1;", "a=x;_b-1=y;"], ["a b=1;", "a=1", "1=1"]),
        ({"type": "object", "additionalProperties": False}, [""], ["a=1;"]),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
            ["a=1;b=x;", "b=;"],
            ["a=1;", "b=x;a=1;", "a=x;b=x;", "b=x;c=1;"],
        ),
        ({"required": ["a"]}, ["a=x;"], ["", "b=x;"]),
        (
            {"properties": {"a": True}, "additionalProperties": {"type": "integer"}},
            ["a=x;b=1;", "b=1;"],
            ["b=x;", "b=1;a=x;"],
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
            ["a=1;", ""],
            ["a=x;"],
        ),
        (
            {"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": {"$ref": "#/$defs/n"}}}, "n": {"const": 1}}},
            ["a=1;"],
            ["a=2;"],
        ),
    ],
)
def test_parameters_come_in_the_order_of_their_declaration(
    parameters: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    writer = GrammarWriter({})
    expression = writer.parameters(parameters, lambda name, schema: f'{name} "=" {writer.value_until(schema, ";")}')
    for text in good:
        assert matches(expression, writer, text), text
    for text in bad:
        assert not matches(expression, writer, text), text


def test_what_an_object_cannot_say_argument_by_argument() -> None:
    closed = {"required": ["a"], "additionalProperties": False}
    odd: list[dict[str, Any]] = [{"anyOf": []}, {"patternProperties": {}}, closed, {"required": [{}]}]
    for parameters in odd:
        with pytest.raises(ValueError, match="anyOf|patternProperties|'a'|required"):
            GrammarWriter({}).properties(parameters)


# --- calls in every format ----------------------------------------------------------------------------------------


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(max_length=12)
    zip: int | None = Field(default=None, ge=100, le=999)


class Weather(BaseModel):
    """Arguments of all kinds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(max_length=40)
    unit: Literal["c", "f"] = "c"
    days: int = Field(ge=1, le=14)
    exact: bool = False
    place: Place | None = None
    tags: list[Literal["a", "b"]] = Field(default=[], max_length=3)


class JsonCalls(ToolFormat):
    """<call>NAME{...}</call>"""

    names = ("json_calls",)
    starts = ("<call>",)
    trigger = "<call>"
    between = ""

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(*self.starts)
        raise NoCall

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"<call>{call.name}{call.arguments}</call>" for call in calls)

    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        calls = [f"{grammar.literal(tool.name)} {grammar.json(tool.parameters)}" for tool in tools]
        return f"{grammar.one_of(calls)} {grammar.literal('</call>')}"


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


MODELS: dict[str, type[BaseModel]] = {"get_weather": Weather, "stop": Nothing}
TOOLS = [Tool(name, model.model_json_schema(), strict=True) for name, model in MODELS.items()]
GOOD = [
    Call("get_weather", '{"text": "ab  c", "days": 3}'),
    Call("get_weather", '{"text": "x\\ny", "unit": "f", "days": 14, "exact": true, "tags": ["a", "b"]}'),
    Call("get_weather", '{"text": "", "days": 1, "place": {"city": "Oslo", "zip": 150}}'),
    Call("stop", "{}"),
]
BAD = [
    Call("get_weather", '{"text": "a", "days": "soon"}'),
    Call("get_weather", '{"text": "a", "days": 15}'),
    Call("get_weather", '{"days": 3}'),
    Call("get_weather", '{"text": "a", "days": 3, "unit": "k"}'),
    Call("get_weather", '{"text": "a", "days": 3, "more": 1}'),
    Call("get_weather", '{"text": "a", "days": 3, "place": {"city": 1}}'),
    Call("get_weather", '{"text": "' + "a" * 41 + '", "days": 3}'),
    Call("stop", '{"a": "b"}'),
    Call("rm_all", "{}"),
]


def required(
    dialect: Dialect,
    *,
    tools: Sequence[Tool] = TOOLS,
    many: bool = True,
    in_thought: bool = False,
    ids: Mapping[str, int] | None = None,
) -> list[Constraint]:
    rules = CallRules(tools, required=True, many=many)
    return answer_constraints(dialect, [], rules, in_thought=in_thought, special_tokens=ids or {})


def name_of(format: ToolFormat) -> str:
    return format.names[0]


@lru_cache
def vocabularies(format: ToolFormat) -> list[Vocabulary]:
    """One in which all is text, and one in which the marks of the format are special tokens."""
    marks = [start for start in (*format.starts, format.trigger) if re.fullmatch(r"[<\[][^<>\[\]\s]+[>\]]", start)]
    longer = [part for call in GOOD for part in re.findall(r"</?[^<>]+>\n?|[^\w\s]+|\w+", format.write([call]))]
    return [Vocabulary(longer=[*longer, *THINK]), Vocabulary([*marks, *THINK], longer)]


@pytest.fixture(params=FORMATS, ids=name_of)
def format(request: pytest.FixtureRequest) -> ToolFormat:
    given: ToolFormat = request.param
    return given


def test_a_required_call_keeps_to_its_schema(format: ToolFormat) -> None:
    dialect = TagDialect(THINK, [format])
    for vocabulary in vocabularies(format):
        constraints = required(dialect, ids=vocabulary.ids)
        for call in GOOD:
            text = format.write([call])
            assert accepts(constraints, text, vocabulary), text
            assert accepts(constraints, f"\n<think>\nor not?\n</think>\n\n{text}", vocabulary), text
            assert accepts(constraints, f"\n\n{text}", vocabulary), text
        for call in BAD:
            text = format.write([call])
            assert not accepts(constraints, text, vocabulary), text
        text = format.write(GOOD[:1])
        for wrong in ("", f"Hello {text}", f"{text} Hello", text[:-1]):
            assert not accepts(constraints, wrong, vocabulary), wrong


def test_there_may_be_several_calls_or_one(format: ToolFormat) -> None:
    dialect = TagDialect(None, [format])
    text = format.write(GOOD)
    for vocabulary in vocabularies(format):
        assert accepts(required(dialect, ids=vocabulary.ids), text, vocabulary), text
        one = required(dialect, many=False, ids=vocabulary.ids)
        assert accepts(one, format.write(GOOD[:1]), vocabulary)
        assert not accepts(one, text, vocabulary)


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_whatever_the_grammar_allows_is_read_as_valid_calls(format: ToolFormat, seed: int) -> None:
    dialect = TagDialect(THINK, [format])
    vocabulary = vocabularies(format)[seed % 2]
    text = walk(required(dialect, many=seed < 2, in_thought=True, ids=vocabulary.ids), vocabulary, seed)
    pieces = pieces_of(dialect, text, TOOLS, in_thought=True)
    check_calls(pieces, text)
    assert content_of(pieces) == "", text


def auto(
    dialect: Dialect, tools: Sequence[Tool] = TOOLS, *, many: bool = True, ids: Mapping[str, int] | None = None
) -> list[Constraint]:
    rules = CallRules(tools, required=False, many=many)
    return answer_constraints(dialect, [], rules, in_thought=False, special_tokens=ids or {})


def test_calls_that_a_model_chooses_to_make_keep_to_strict_schemas(format: ToolFormat) -> None:
    dialect = TagDialect(THINK, [format])
    for vocabulary in vocabularies(format):
        constraints = auto(dialect, ids=vocabulary.ids)
        thought = "<think>\nhow?\n</think>\n\n"
        before = "Let me see.\n" if format.trigger else ""
        for text in ("", "Hello, é!\n", f"{thought}Hello `x`"):
            assert accepts(constraints, text, vocabulary), text
        for call in GOOD:
            text = format.write([call])
            assert accepts(constraints, text, vocabulary), text
            assert accepts(constraints, f"{thought}{before}{text}", vocabulary), text
        for call in BAD[:2]:
            text = format.write([call])
            assert not accepts(constraints, text, vocabulary), text
            assert not accepts(constraints, f"{thought}{before}{text}", vocabulary), text


def test_a_call_in_a_thought_and_one_that_is_mentioned_are_free() -> None:
    format = JsonCalls()
    dialect = TagDialect(THINK, [format])
    bad = format.write(BAD[:1])
    constraints = auto(dialect)
    assert accepts(constraints, f"<think>{bad}</think>\n\nNo `<call>` here.\n{format.write(GOOD[:1])}")
    assert not accepts(constraints, f"No `{bad}`\n{bad}")
    assert not accepts(constraints, f"<think></think>{bad}")


def test_there_is_one_call_where_parallel_ones_are_ruled_out() -> None:
    format = JsonCalls()
    one, two = format.write(GOOD[:1]), format.write(GOOD[:2])
    constraints = auto(TagDialect(None, [format]), many=False)
    assert accepts(constraints, f"I call {one} now")
    assert not accepts(constraints, two)
    # That alone is a reason for a grammar. The schemas are then left to the model.
    loose = auto(TagDialect(None, [format]), [tool._replace(strict=False) for tool in TOOLS], many=False)
    assert accepts(loose, format.write(BAD[:1]))
    assert not accepts(loose, two)
    assert not accepts(loose, format.write(BAD[-1:]))


def test_there_is_no_grammar_where_there_is_nothing_to_enforce() -> None:
    dialect = TagDialect(THINK, [JsonCalls()])
    loose = [tool._replace(strict=False) for tool in TOOLS]
    assert auto(dialect, loose) == []
    assert answer_constraints(dialect, [], None, in_thought=True, special_tokens={}) == []


def check_calls(pieces: Sequence[Piece], text: str) -> None:
    calls = calls_in(pieces)
    assert calls, text
    for name, arguments in calls:
        try:
            MODELS[name].model_validate_json(arguments)
        except ValidationError as error:
            raise AssertionError(f"{arguments} in {text!r}") from error


def walk(constraints: Sequence[Constraint], vocabulary: Vocabulary, seed: int) -> str:
    """Random tokens that the constraints allow, up to an end that they allow. Longer tokens are likelier."""
    (constraint,) = constraints
    matcher = matcher_of(constraint, vocabulary)
    chance = random.Random(seed)
    tokens: list[int] = []
    for _ in range(4000):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.3):
            return vocabulary.decode(tokens)
        token = vocabulary.choice(mask, chance)
        assert matcher.consume_token(token)
        tokens.append(token)
    raise AssertionError(f"no end of {vocabulary.decode(tokens)[-300:]!r}")


# --- tools whose schemas cannot be enforced -----------------------------------------------------------------------

ODD = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, "required": ["a"]}


def test_what_cannot_be_enforced_of_a_strict_tool_is_refused() -> None:
    tools = [Tool("ok", {}, strict=True), Tool("odd", ODD, strict=True, param="tools.1.function.parameters")]
    for make in (required, auto):
        with pytest.raises(Unsupported, match="tools.1.function.parameters: this JSON schema.*uniqueItems") as raised:
            make(TagDialect(None, [JsonCalls()]), tools=tools)
        assert raised.value.param == "tools.1.function.parameters"
    wrong = [Tool("wrong", {"properties": {"a": {"type": "strange"}}}, strict=True, param="tools.0")]
    with pytest.raises(InvalidRequest, match="strange") as invalid:
        required(TagDialect(None, [JsonCalls()]), tools=wrong)
    assert invalid.value.param == "tools.0"


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (ODD, '{"a": [1, 1]}', '{"a": ["x"]}'),
        ({"properties": {"a": {"type": "strange"}, "b": {"type": "integer"}}}, '{"a": 1}', '{"b": "x"}'),
        ({"properties": {"a": {"type": "integer", "required": True}}}, '{"a": 1}', '{"a": "x"}'),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, '{"a": 1}', "[]"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, '{"a": "b"}', '{"a": 1}'),
        ({"properties": {"a": {"enum": ["\x01"]}}}, '{"b": 1}', "1"),
        ({"properties": []}, '{"b": 1}', "1"),
    ],
)
def test_of_other_tools_as_much_is_enforced_as_can_be(parameters: dict[str, Any], good: str, bad: str) -> None:
    tools = [Tool("odd", parameters), Tool("ok", Weather.model_json_schema())]
    format = JsonCalls()
    constraints = required(TagDialect(None, [format]), tools=tools)
    assert accepts(constraints, format.write([Call("odd", good)]))
    assert not accepts(constraints, format.write([Call("odd", bad)]))
    assert accepts(constraints, format.write([Call("ok", GOOD[0].arguments)]))
    assert not accepts(constraints, format.write([Call("ok", BAD[0].arguments)]))


def test_schemas_that_refer_to_themselves(format: ToolFormat) -> None:
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/node"} for name in "abcdef"}}
    parameters = {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"type": "object", "properties": {"a": deep}}
    text = format.write([Call("odd", '{"root": {"a": {"b": {}}}}')])
    for tool in (Tool("odd", parameters), Tool("odd", deep)):
        (constraint,) = required(TagDialect(None, [format]), tools=[tool])
        assert len(constraint.text) < 10_000
        assert accepts([constraint], text) or accepts([constraint], text.replace("{root:{a:{b:{}}}}", '{"root": {}}'))


def test_odd_schemas_in_every_format(format: ToolFormat) -> None:
    dialect = TagDialect(None, [format])
    for parameters in (ODD, {"anyOf": [{"required": ["a"]}]}, {"type": ["object", "null"]}, {}, {"properties": None}):
        constraints = required(dialect, tools=[Tool("odd", parameters)])
        text = format.write([Call("odd", '{"a": [1]}')])
        assert accepts(constraints, text) or accepts(constraints, text.replace("{a:[1]}", '{"a": [1]}')), text


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_many_tools(name: str) -> None:
    format = format_named(name)
    assert format is not None
    tools = [Tool(f"tool_{index}", Weather.model_json_schema()) for index in range(64)]
    constraints = required(TagDialect(None, [format]), tools=tools)
    assert not accepts(constraints, format.write([Call("tool_1", BAD[0].arguments)]))
    assert accepts(constraints, format.write([Call("tool_63", GOOD[0].arguments)]))


# --- answers ------------------------------------------------------------------------------------------------------

NUMBERS = Constraint("regex", "[0-9]+", "regex_pattern")
OBJECT = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}', "response_format")
ANSWERS = [
    (NUMBERS, "42", "x"),
    (OBJECT, '{"a": 1}', '{"a": "x"}'),
    (Constraint("lark", 'start: "a" b\nb: "c"+', "grammar"), "acc", "a"),
    (Constraint("gbnf", 'root ::= "a" [0-9]', "grammar"), "a1", "ab"),
]


def framed(
    dialect: Dialect,
    *constraints: Constraint,
    calls: CallRules | None = None,
    in_thought: bool = False,
    ids: Mapping[str, int] | None = None,
) -> list[Constraint]:
    return answer_constraints(dialect, constraints, calls, in_thought=in_thought, special_tokens=ids or {})


@pytest.mark.parametrize(("constraint", "good", "bad"), ANSWERS)
def test_thoughts_before_a_constrained_answer_are_free(constraint: Constraint, good: str, bad: str) -> None:
    dialect = TagDialect(THINK, [])
    for vocabulary in (PLAIN, Vocabulary(THINK)):
        constraints = framed(dialect, constraint, ids=vocabulary.ids)
        assert accepts(constraints, good, vocabulary)
        assert accepts(constraints, f"<think>\nx {bad} `é`\n</think>\n\n{good}", vocabulary)
        assert not accepts(constraints, f"<think></think>{bad}", vocabulary)
        assert not accepts(constraints, bad, vocabulary)
        assert not accepts(constraints, f"<think>{good}", vocabulary)
        assert not accepts(constraints, f"<think></think>{good}</think>", vocabulary)
        inside = framed(dialect, constraint, ids=vocabulary.ids, in_thought=True)
        assert accepts(inside, f"so</think>\n{good}", vocabulary)
        assert not accepts(inside, good, vocabulary)


def test_without_thoughts_a_constraint_stays_as_it_is() -> None:
    assert framed(TagDialect(None, [JsonCalls()]), NUMBERS, OBJECT) == [NUMBERS, OBJECT]


def test_several_constraints_hold_after_one_thought() -> None:
    small = Constraint("regex", "[0-5x]+", "regex_pattern")
    constraints = framed(TagDialect(THINK, []), NUMBERS, small)
    assert accepts(constraints, "<think>7</think>42")
    for wrong in ("47", "x", "<think></think>4x"):
        assert not accepts(constraints, wrong)


def test_a_model_may_call_or_answer_as_constrained() -> None:
    format = JsonCalls()
    dialect = TagDialect(THINK, [format])
    loose = [tool._replace(strict=False) for tool in TOOLS]
    constraints = framed(dialect, OBJECT, calls=CallRules(loose, required=False, many=True))
    for text in ('{"a": 1}', "<think>a</think>{}", format.write(BAD[:1]), format.write(GOOD)):
        assert accepts(constraints, text), text
    for text in ("Hello", "{} " + format.write(GOOD[:1]), format.write(GOOD[:1]) + "{}"):
        assert not accepts(constraints, text), text
    (calls,) = framed(dialect, OBJECT, calls=CallRules(TOOLS, required=True, many=True))
    assert calls.frame is None
    assert not accepts([calls], "{}")


def test_a_frame_is_checked_as_it_will_be_used() -> None:
    with pytest.raises(Unsupported, match="response_format"):
        framed(TagDialect(THINK, []), Constraint("json_schema", '{"uniqueItems": true}', "response_format"))


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")


@pytest.mark.parametrize("special", [(), HARMONY_TOKENS])
def test_harmony(special: tuple[str, ...]) -> None:
    dialect, vocabulary = HarmonyDialect(), Vocabulary(special)
    ids = vocabulary.ids
    analysis = "<|channel|>analysis<|message|>so { <"
    following = "<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    preamble = f"<|channel|>commentary<|message|>I look.{following}"
    good, bad = GOOD[0].arguments, BAD[0].arguments

    constraints = framed(dialect, OBJECT, ids=ids)
    for text in (
        f'{final}{{"a": 1}}',
        f"{analysis}{following}{final}{{}}",
        f"{preamble}{analysis}{following}{final}{{}}",
    ):
        assert accepts(constraints, text, vocabulary), text
    for text in ("{}", f"{final}x", f"{analysis}{following}{{}}", f"{header}{good}"):
        assert not accepts(constraints, text, vocabulary), text
    inside = framed(dialect, OBJECT, ids=ids, in_thought=True)
    assert accepts(inside, f"so{following}{final}{{}}", vocabulary)

    forced = required(dialect, ids=ids)
    assert accepts(forced, f"{analysis}{following}{header}{good}", vocabulary)
    for text in (
        f"{header}{bad}",
        f"{final}Hi",
        f"{preamble}{header}{good}",
        f"{header}{good}{following}{header}{good}",
    ):
        assert not accepts(forced, text, vocabulary), text
    free = auto(dialect, ids=ids)
    for text in (f"{final}Hi", f"{preamble}{header}{good}", f"{analysis}{following}{header}{good}"):
        assert accepts(free, text, vocabulary), text
    assert not accepts(free, f"{header}{bad}", vocabulary)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_grammar_in_harmony_allows_is_read_as_valid_calls(seed: int) -> None:
    vocabulary = Vocabulary(HARMONY_TOKENS, ['"', '", "', "}", "[", "]"])
    dialect = HarmonyDialect()
    text = walk(required(dialect, in_thought=seed > 0, ids=vocabulary.ids), vocabulary, seed)
    check_calls(pieces_of(dialect, text, TOOLS, in_thought=seed > 0), text)


GLIMMER_TOKENS = ("<|start|>", "<|message|>", "<|eom|>")


@pytest.mark.parametrize("special", [(), GLIMMER_TOKENS])
def test_glimmer(special: tuple[str, ...]) -> None:
    dialect, vocabulary = GlimmerDialect(), Vocabulary(special)
    ids = vocabulary.ids
    thought = " to=self<|message|>so <<|eom|><|start|>assistant"
    following = "<|eom|><|start|>assistant"
    user = " to=user<|message|>"

    def call(days: str) -> str:
        return (
            ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
            f'<atem:parameter name="text">a</atem:parameter>\n<atem:parameter name="days">{days}</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>"
        )

    constraints = framed(dialect, OBJECT, ids=ids)
    for text in (f'{user}{{"a": 1}}', f"{thought}{user}{{}}", f"{thought}{thought}{user}{{}}"):
        assert accepts(constraints, text, vocabulary), text
    for text in ("{}", f"{user}x", f"{thought}{{}}", call("3")):
        assert not accepts(constraints, text, vocabulary), text
    assert accepts(framed(dialect, OBJECT, ids=ids, in_thought=True), f"so{following}{user}{{}}", vocabulary)

    forced = required(dialect, ids=ids)
    assert accepts(forced, thought + call("3"), vocabulary)
    assert accepts(forced, call("3") + following + call("14"), vocabulary)
    for text in (call("x"), f"{user}Hi", call("3") + following + call("15")):
        assert not accepts(forced, text, vocabulary), text
    assert not accepts(required(dialect, many=False, ids=ids), call("3") + following + call("4"), vocabulary)
    assert accepts(auto(dialect, ids=ids), f"{user}Hi", vocabulary)
    assert not accepts(auto(dialect, ids=ids), call("x"), vocabulary)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_grammar_in_glimmer_allows_is_read_as_valid_calls(seed: int) -> None:
    vocabulary = Vocabulary(GLIMMER_TOKENS, ["</atem:parameter>\n", '"', '", "', "}", "[", "]"])
    dialect = GlimmerDialect()
    text = walk(required(dialect, in_thought=seed > 0, ids=vocabulary.ids), vocabulary, seed)
    check_calls(pieces_of(dialect, text, TOOLS, in_thought=seed > 0), text)
