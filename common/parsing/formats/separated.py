"""Lists with a separator in grammars, such as those of arguments in brackets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter


def separated(members: Sequence[tuple[str, bool]], separator: str, grammar: GrammarWriter) -> str:
    """Members in their order, with a separator between each two.

    Args:
        members: Lark expressions, and whether each is required; the others may be left out.
    """
    between = grammar.literal(separator)
    rests = [""]  # what may follow each member, from the last on
    for member, required in reversed(members[1:]):
        more = f"{between} {member}" if required else f"({between} {member})?"
        rests.append(grammar.rule(f"{more} {rests[-1]}"))
    whole = []
    for (member, required), rest in zip(members, reversed(rests), strict=False):
        whole.append(f"{member} {rest}")
        if required:
            return grammar.one_of(whole)
    return grammar.one_of([*whole, '""'])
