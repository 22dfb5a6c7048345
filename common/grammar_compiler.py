"""Schemas, regular expressions and grammars -> what llguidance takes; and what is wrong with them.

Run as a program (`python -m common.grammar_compiler`, JSON of a list on stdin: kind, text and frame of a `Constraint`),
it prints the answer of `problem_of()`. That is how a server checks what a client sent: some texts keep the compiler
busy for ever or fill the memory, and a process can be ended. It therefore imports little.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from common.json_schema import prepare

if TYPE_CHECKING:
    from common.generation import ConstraintKind

# What compiling one constraint may cost, in the engine process too, where everybody waits meanwhile.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
MOST_CPU_SECONDS = 2.0

_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LARK_TOKEN = re.compile(r"<[^<>\s]+>")
_LARK_TOKEN_IDS = re.compile(r"<\[[^\]]*\]>")
# What llguidance says.
_NO_TOKENIZER = "no tokenizer"
_NOTHING_MATCHES = "NoExtension"


def to_llguidance(kind: ConstraintKind, text: str, frame: str | None = None) -> str:
    """The grammar for an `LLMatcher`, of the members of a `Constraint`.

    Raises:
        ValueError: the text cannot be read, or asks for what would not be enforced. Not all that is wrong is found
            here, see `problem_of()`.
    """
    answer = _grammar(kind, text)
    grammars = [answer] if frame is None else [{"lark_grammar": frame}, {"name": "answer", **answer}]
    return json.dumps({"grammars": grammars})


def problem_of(kind: ConstraintKind, text: str, frame: str | None = None) -> str | None:
    """Why nothing can be made to match the text; None where all is well, as far as that does not hang on a tokenizer.

    May take for ever.
    """
    started = time.process_time()
    try:
        grammar = to_llguidance(kind, text, frame)
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


def _grammar(kind: ConstraintKind, text: str) -> dict[str, Any]:
    """A member of the list of grammars that llguidance takes."""
    match kind:
        case "json_schema":
            try:
                given = json.loads(text)
            except RecursionError as error:
                raise ValueError("it is nested too deeply") from error
            return {"json_schema": prepare(given)}
        case "lark":
            return {"lark_grammar": text}
        case "regex":
            grammar: dict[str, Any] = json.loads(grammar_from("regex", text))
            (only,) = grammar["grammars"]
            return {"lark_grammar": only["lark_grammar"]}
        case "gbnf":
            mended = _GBNF_ESCAPE.sub(_gbnf_character, text)
            try:
                return {"lark_grammar": grammar_from("gbnf", mended)}
            except ValueError as error:
                reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
                raise ValueError(reason) from error


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
    kind, text, frame = json.load(sys.stdin.buffer)
    sys.stdout.buffer.write((problem_of(kind, text, frame) or "").encode(errors="replace"))


if __name__ == "__main__":
    _main()
