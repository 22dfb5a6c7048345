"""Pieces of Lark grammars as llguidance reads them: strings, and regular expressions in Rust's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

ANY: Final = "(?s:.*)"

_META: Final = frozenset(r"\.+*?()|[]{}^$#&-~/")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def string(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)  # Lark's strings are JSON's


def regex(*patterns: str, but: Sequence[str] = ()) -> str:
    """A terminal that matches all of some patterns, and none of others."""
    # One complement of several patterns: llguidance gets lost in an intersection of several complements.
    return " & ".join([*(f"/{pattern}/" for pattern in patterns), *([f"~/{'|'.join(but)}/"] if but else [])])


def escaped(text: str) -> str:
    """A pattern that matches exactly this text."""
    pattern = "".join(f"\\{character}" if character in _META else character for character in text)
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", pattern)


def without(strings: Collection[str]) -> str | None:
    """A pattern of texts in which none of some strings stands; None where a character with which one of them begins
    stands within one, too.

    It says so without a complement, which llguidance gets lost in where a length counts as well.
    """
    firsts = {string[0] for string in strings}
    if not firsts:
        return ANY
    if any(firsts & set(string[1:]) for string in strings):
        return None
    part = _beginning(strings)
    return f"({_none_of(firsts)}|({part})*({_leaving(strings, firsts)}))*({part})*"


def _beginning(strings: Iterable[str]) -> str:
    """A pattern of what one of some strings begins with, but is not all of it."""
    parts = []
    for character, rests in _by_first(strings).items():
        more = _beginning(rests) if all(rests) else None
        if more is not None:
            parts.append(f"{escaped(character)}({more})?" if more else escaped(character))
    return "|".join(parts)


def _leaving(strings: Iterable[str], firsts: set[str]) -> str:
    """A pattern of what one of some strings begins with, and a character with which it does not go on."""
    parts = []
    for character, rests in _by_first(strings).items():
        if all(rests):
            following = _by_first(rests)
            ways = [_none_of({*following, *firsts}), _leaving(rests, firsts)]
            parts.append(f"{escaped(character)}({'|'.join(filter(None, ways))})")
    return "|".join(parts)


def _by_first(strings: Iterable[str]) -> dict[str, list[str]]:
    """What follows the first character of the strings, by that."""
    rests: dict[str, list[str]] = {}
    for string in strings:
        rests.setdefault(string[0], []).append(string[1:])
    return rests


def _none_of(characters: Iterable[str]) -> str:
    return f"[^{''.join(escaped(character) for character in sorted(characters))}]"


def containing(pattern: str) -> str:
    """A pattern of texts in which a pattern is found, as the keyword `pattern` of JSON schemas means it.

    Raises:
        ValueError: an anchor stands elsewhere than at the beginning or the end.
    """
    alternatives = []
    for alternative in _alternatives(pattern):
        before, after = ANY, ANY
        if alternative[:1] == ["^"]:
            before, alternative = "", alternative[1:]
        if alternative[-1:] == ["$"]:
            after, alternative = "", alternative[:-1]
        if "^" in alternative or "$" in alternative:
            raise ValueError(f"an anchor within the pattern {json.dumps(pattern)} is not supported")
        alternatives.append(f"{before}(?:{''.join(alternative)}){after}")
    return "|".join(alternatives)


def _alternatives(pattern: str) -> list[list[str]]:
    """A pattern split at each `|` that is in no group, and then into escapes, classes and characters.

    The result can stand between slashes.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for match in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        piece = match.group()
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            alternatives.append([])
            continue
        if piece in ("^", "$") and depth:
            raise ValueError(f"an anchor within the pattern {json.dumps(pattern)} is not supported")
        if len(piece) == 1 or piece[0] == "[":
            piece = re.sub(r"(\\.)|/", lambda part: part[1] or "\\/", piece, flags=re.DOTALL)
        alternatives[-1].append(_CONTROL.sub(lambda part: f"\\x{ord(part.group()):02x}", piece))
    return alternatives
