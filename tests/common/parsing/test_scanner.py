"""What is read does not depend on how the text is cut, and reading it takes no longer for being cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.pieces import NoCall, Streaming, Waiting
from common.parsing.scanner import Scanner, markers
from tests.common.parsing.answers import chunk_sizes, cut

Primitive: TypeAlias = Callable[[Scanner], Waiting[Any]]
LETTERS = re.compile("[ab]*")


def joined(reading: Streaming[str | None]) -> Waiting[tuple[str, str | None]]:
    text = ""
    while True:
        try:
            piece = next(reading)
        except StopIteration as stop:
            return text, stop.value
        if piece is None:
            yield None
        else:
            text += piece


PRIMITIVES: list[Primitive] = [
    lambda scanner: scanner.accept("<a>", "<ab>", "<"),
    lambda scanner: scanner.ahead("<ab>", "b"),
    lambda scanner: scanner.expect("<", "a", " "),
    lambda scanner: scanner.run(LETTERS),
    lambda scanner: scanner.blanks(),
    lambda scanner: scanner.until("<a>"),
    lambda scanner: scanner.until("<ab>b", "<a", "ab>", limit=3),
    lambda scanner: joined(scanner.stream_until("<ab>b", "<ab>", "b>")),
    lambda scanner: scanner.peek(4),
    lambda scanner: scanner.at_end(),
]


def run(primitives: Sequence[Primitive], scanner: Scanner) -> Waiting[list[object]]:
    """What each gives, and where it leaves the scanner."""
    results: list[object] = []
    for primitive in primitives:
        try:
            result = yield from primitive(scanner)
        except NoCall:
            result = NoCall
        results += [result, scanner.position, scanner.last]
    return results


def finish(reading: Waiting[list[object]], scanner: Scanner, chunks: Sequence[str]) -> list[object]:
    """Drives a reading as `AnswerParser` does."""
    try:
        next(reading)
        for chunk in chunks:
            scanner.feed(chunk)
            next(reading)
        scanner.end("complete")
        next(reading)
    except StopIteration as stop:
        result: list[object] = stop.value
        return result
    raise AssertionError("it waits for more than there is")


@given(
    st.lists(st.sampled_from(["<a>", "<ab>", "<ab>b", "<", "a", "b", ">", " ", "\n"]), max_size=12).map("".join),
    st.lists(st.sampled_from(PRIMITIVES), min_size=1, max_size=8),
    chunk_sizes,
)
def test_primitives_give_the_same_for_all_chunks(text: str, primitives: list[Primitive], sizes: list[int]) -> None:
    whole, pieces = Scanner(), Scanner()
    assert finish(run(primitives, whole), whole, [text]) == finish(
        run(primitives, pieces), pieces, list(cut(text, sizes))
    )


@given(st.text("ab<", min_size=1, max_size=30), st.integers(1, 30), chunk_sizes)
def test_rewinding_goes_back_to_the_mark(text: str, place: int, sizes: list[int]) -> None:
    scanner = Scanner()

    def reading() -> Waiting[list[object]]:
        before = yield from scanner.peek(place)
        yield from scanner.accept(before)
        scanner.mark()
        here = (scanner.position, scanner.last)
        rest, _ = yield from scanner.until("#")
        assert scanner.since_mark() == rest
        scanner.rewind()
        assert (scanner.position, scanner.last) == here
        again, _ = yield from scanner.until("#")
        return [before, rest, again]

    expected = [text[:place], text[place:], text[place:]]
    assert finish(reading(), scanner, list(cut(text, sizes))) == expected


def test_a_limit_counts_the_text_before_the_end() -> None:
    scanner = Scanner()
    scanner.feed("abc>")
    with pytest.raises(NoCall):
        next(scanner.until(">", limit=2))
    assert scanner.position == 0
    with pytest.raises(StopIteration) as stop:
        next(scanner.until(">", limit=3))
    assert stop.value.value == ("abc", ">")


@pytest.mark.parametrize(("ending", "raises"), [("complete", False), ("cut", True)])
def test_what_is_missing_is_forgiven_only_if_the_model_ended_itself(
    ending: Literal["complete", "cut"], raises: bool
) -> None:
    scanner = Scanner()
    scanner.end(ending)
    with pytest.raises(NoCall) if raises else nullcontext():
        scanner.missing()


def test_the_longest_of_the_leftmost_markers_is_found() -> None:
    found = markers("<a", "<ab>", "b>")
    assert found.find("xx<ab>", 0, more=True) == (2, "<ab>")
    assert found.find("xx<ab", 0, more=True) == (2, None)  # it may become the longer one
    assert found.find("xx<ab", 0, more=False) == (2, "<a")
    assert found.find("xx<", 0, more=True) == (2, None)
    assert found.find("xx<", 0, more=False) == (3, None)
    assert markers().find("xx", 0, more=True) == (2, None)


def test_what_has_been_read_is_not_kept() -> None:
    scanner = Scanner()
    looked_for = markers("#")
    for _ in range(1000):
        scanner.feed("x" * 1000)
        scanner.read_before(looked_for)
    assert scanner.position == 1_000_000
    assert len(scanner._text) <= 1000
