"""Schemas, regular expressions and grammars -> what llguidance takes; and what is wrong with them.

Run as a program (`python -m common.grammar_compiler`, a `ConstraintKind` as its argument, the text on stdin), it prints
the answer of `problem_of()`. That is how a server checks what a client sent: some texts keep the compiler busy for ever
or fill the memory, and a process can be ended. It therefore imports little.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

if TYPE_CHECKING:
    from common.generation import ConstraintKind

# What compiling one constraint may cost, in the engine process too, where everybody waits meanwhile.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
MOST_CPU_SECONDS = 2.0

# A model that is free to write blanks may do so for ever; this lets it indent.
WHITESPACE = r"[ \t]{1,32}|\r?\n[ \t]{0,32}"
# Without \u, with which a key could be spelled in a second way, past the schema of the first.
ESCAPES = 'nrtbf\\"'
_NEEDS_OTHER_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

# Keywords of a JSON schema below which there are schemas: one, a list, or a mapping of them.
SCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties", "not", "contains", "if", "then", "else")
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LARK_TOKEN = re.compile(r"<[^<>\s]+>")
_LARK_TOKEN_IDS = re.compile(r"<\[[^\]]*\]>")
# What llguidance says.
_NO_TOKENIZER = "no tokenizer"
_NOTHING_MATCHES = "NoExtension"


def to_llguidance(kind: ConstraintKind, text: str) -> str:
    """The grammar for an `LLMatcher`.

    Raises:
        ValueError: the text cannot be read, or asks for what would not be enforced. Not all that is wrong is found
            here, see `problem_of()`.
    """
    if kind == "json_schema":
        return _json_schema(text)
    if kind == "gbnf":
        mended = _GBNF_ESCAPE.sub(_gbnf_character, text)
        try:
            return grammar_from("gbnf", mended)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")) from error
    return grammar_from(kind, text)


def problem_of(kind: ConstraintKind, text: str) -> str | None:
    """Why nothing can be made to match the text; None where all is well, as far as that does not hang on a tokenizer.

    May take for ever.
    """
    started = time.process_time()
    try:
        grammar = to_llguidance(kind, text)
    except ValueError as error:
        return str(error)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    for message in messages:
        # A warning says that a part of the text would not be enforced.
        if failed or not message.startswith(_NO_TOKENIZER):
            return message
    # Some limits are met only with a tokenizer.
    sample = _LARK_TOKEN_IDS.sub("<[0]>", grammar) if messages else grammar
    matcher = LLMatcher(_byte_tokenizer(_LARK_TOKEN.findall(sample) if messages else []), sample, limits=LIMITS)
    matcher.compute_bitmask()  # the first may be the most costly
    if matcher.is_error():
        return "nothing matches it" if _NOTHING_MATCHES in matcher.get_error() else matcher.get_error()
    if time.process_time() - started > MOST_CPU_SECONDS:
        return "it is too complex: it takes too long to compile"
    return None


# --- JSON schemas -------------------------------------------------------------------------------------------------


def _json_schema(text: str) -> str:
    try:
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {"allOf": [schema]}
        if not isinstance(schema, dict):
            raise ValueError("it must be an object or a boolean")
        for part in _schemas(schema):
            _prepare(part)
        prepared = json.dumps(schema)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return LLMatcher.grammar_from_json_schema(
        prepared,
        overrides={
            "whitespace_pattern": WHITESPACE,
            "json_allowed_escapes": ESCAPES,
            "lenient": False,
            "coerce_one_of": False,
        },
    )


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


# --- the other kinds ----------------------------------------------------------------------------------------------


def _gbnf_character(escape: re.Match[str]) -> str:
    """llguidance's converter damages \\u and \\U, so they become the character or \\x; other escapes stay."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return chr(code)


class _Bytes:
    """A vocabulary of the 256 bytes, an end-of-sequence token, and special tokens."""

    def __init__(self, special: list[str]) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [bytes([value]) for value in range(256)] + [name.encode() for name in ("<eos>", *special)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _byte_tokenizer(special: list[str]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(sorted(set(special)))))


def _main() -> None:
    kind: Any = sys.argv[1]
    text = sys.stdin.buffer.read().decode(errors="surrogatepass")
    sys.stdout.buffer.write((problem_of(kind, text) or "").encode(errors="replace"))


if __name__ == "__main__":
    _main()
