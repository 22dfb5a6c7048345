"""What is fed comes out as pieces, each kind as one."""

from __future__ import annotations

from common.parsing.answer import AnswerParser, joined
from common.parsing.dialect import ReadOptions
from common.parsing.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Thought
from common.parsing.tags import TagDialect

THOUGHTS = TagDialect(("<think>", "</think>"), ())


def test_neighbours_of_a_kind_are_joined() -> None:
    assert joined([Thought("a"), Thought("b"), Content("c", 5), Content("d", 6), Content("e", 9)]) == [
        Thought("ab"),
        Content("cd", 5),
        Content("e", 9),
    ]
    call: list[Piece] = [CallBegin("x"), CallArguments("{"), CallArguments("}"), CallEnd()]
    assert joined([*call, *call]) == [CallBegin("x"), CallArguments("{}"), CallEnd()] * 2
    assert joined([]) == []


def test_thinking_follows_the_text() -> None:
    parser = AnswerParser(THOUGHTS, ReadOptions())
    thinking = []
    for chunk in ("<thi", "nk>", "a", "</think", ">", "b", "<think>"):
        parser.feed(chunk)
        thinking.append(parser.thinking)
    assert thinking == [False, True, True, True, False, False, True]
    parser.end("cut")
    assert parser.thinking  # the text ends inside a thought


def test_an_answer_may_begin_in_a_thought() -> None:
    parser = AnswerParser(THOUGHTS, ReadOptions(in_thought=True))
    assert parser.thinking
    assert parser.feed("a</think>b") == [Thought("a"), Content("b", 9)]
    assert not parser.thinking
    assert not AnswerParser(TagDialect(None, ()), ReadOptions(in_thought=True)).thinking  # it has no thoughts


def test_no_text_gives_no_pieces() -> None:
    parser = AnswerParser(THOUGHTS, ReadOptions())
    assert parser.feed("") == []
    assert parser.end("complete") == []
