"""What a whole answer looks like in each dialect, as Lark expressions; see `Dialect.frame()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from common.parsing.dialect import CallRules
from common.parsing.formats.base import Schema, Tool, ToolFormat

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

_ANSWER: Final = "@answer"

# --- tags ---------------------------------------------------------------------------------------------------------


def tags(
    thoughts: tuple[str, str] | None,
    formats: Sequence[ToolFormat],
    grammar: GrammarWriter,
    calls: CallRules | None,
    *,
    answer: bool,
    in_thought: bool,
) -> str:
    """Calls are written in the first of the formats."""
    opened = maybe_thought = ""
    if thoughts is not None:
        opened = f"{grammar.quoted_until(thoughts[1])} {grammar.blanks()}"
        maybe_thought = f"({grammar.blanks()} {grammar.literal(thoughts[0])} {opened})?"
    first = opened if in_thought else maybe_thought
    if calls is None:
        return f"{first} {_ANSWER}"
    own, *_ = formats
    block = grammar.rule(own.block(calls.tools, grammar, many=calls.many))
    whole = f"{grammar.literal(own.trigger)} {block}"
    if calls.many and own.between is not None:
        whole = f"{whole} ({grammar.literal(own.between + own.trigger)} {block})*"
    if calls.required:
        return f"{first} {grammar.blanks()} {whole}"
    if answer:
        return f"{first} {grammar.one_of([whole, _ANSWER])}"

    # Text holds no call that is not enforced, and does not hide a thought, in which calls are not.
    marks = set(own.starts)
    tag = thoughts[:1] if thoughts is not None else ()
    if not own.trigger:
        # Such a call is the whole answer.
        text = grammar.any_text(marks.difference(own.bare_starts), not_first=(*own.starts, *tag))
        return f"{first} {grammar.one_of([whole, text])}"
    mark = max((start for start in own.starts if own.trigger.startswith(start)), key=len, default=own.trigger)
    marks.add(mark)
    before = grammar.text_until(mark, marks, not_first=tag, unquoted=True)
    call = f"{before} {grammar.literal(own.trigger.removeprefix(mark))} {block} {maybe_thought}"
    after = grammar.any_text(marks, not_first=tag, unquoted=True)
    return f"{first} ({call}){'*' if calls.many else '?'} {after}"


# --- Harmony ------------------------------------------------------------------------------------------------------

_NEXT_MESSAGE: Final = "<|end|><|start|>assistant"


def harmony(grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
    """An answer has one call at most: its mark is that of the end of an answer, too."""
    body = grammar.text_until(_NEXT_MESSAGE)
    free = ["analysis"] if calls is not None and calls.required else ["analysis", "commentary"]
    messages = grammar.one_of([grammar.literal(f"<|channel|>{channel}<|message|>") for channel in free])
    endings = []
    if calls is None or not calls.required:
        text = _ANSWER if answer else grammar.any_text()
        endings.append(f"{grammar.literal('<|channel|>final<|message|>')} {text}")
    for tool in calls.tools if calls is not None else ():
        header = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        endings.append(f"{grammar.literal(header)} {grammar.json(tool.parameters)}")
    return f"{body + ' ' if in_thought else ''}({messages} {body})* {grammar.one_of(endings)}"


# --- Glimmer ------------------------------------------------------------------------------------------------------

_NEXT_GLIMMER_MESSAGE: Final = "<|eom|><|start|>assistant"


def glimmer(grammar: GrammarWriter, calls: CallRules | None, *, answer: bool, in_thought: bool) -> str:
    body = grammar.text_until(_NEXT_GLIMMER_MESSAGE)
    endings = []
    if calls is None or not calls.required:
        text = _ANSWER if answer else grammar.any_text()
        endings.append(f"{grammar.literal(' to=user<|message|>')} {text}")
    if calls is not None:
        call = grammar.rule(grammar.one_of([_glimmer_call(tool, grammar) for tool in calls.tools]))
        more = f" ({grammar.literal(_NEXT_GLIMMER_MESSAGE)} {call})*" if calls.many else ""
        endings.append(f"{call}{more}")
    thought = f"({grammar.literal(' to=self<|message|>')} {body})*"
    return f"{body + ' ' if in_thought else ''}{thought} {grammar.one_of(endings)}"


def _glimmer_call(tool: Tool, grammar: GrammarWriter) -> str:
    before, after = grammar.literal('<atem:parameter name="'), grammar.literal('">')

    def argument(name: str, schema: Schema) -> str:
        value = grammar.value_until(schema, "</atem:parameter>\n")
        return f"{before} {name} {after} {value}"

    start = f' to={tool.name}<|message|><atem:function_calls>\n<atem:invoke name="{tool.name}">\n'
    end = "</atem:invoke>\n</atem:function_calls>"
    return f"{grammar.literal(start)} {grammar.parameters(tool.parameters, argument)} {grammar.literal(end)}"
