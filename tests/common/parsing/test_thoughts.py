"""Which tokens are counted as those of thoughts, when their budget is spent, and what ends them then."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.generation import Thoughts
from common.parsing.thoughts import ThoughtTracker, ending

TAGS = Thoughts(dialect="tags", start="<think>", end="</think>")
INSIDE = msgspec.structs.replace(TAGS, inside=True)
HARMONY = Thoughts(dialect="harmony")
GLIMMER = Thoughts(dialect="glimmer")


def counts(thoughts: Thoughts, tokens: list[str]) -> list[int]:
    """The count after each token."""
    tracker = ThoughtTracker(thoughts)
    found = []
    for token in tokens:
        tracker.feed(token.encode())
        found.append(tracker.tokens)
    return found


@pytest.mark.parametrize(
    ("thoughts", "tokens", "expected"),
    [
        (TAGS, ["Hi", " there"], [0, 0]),
        (TAGS, ["<think>", "a", "b", "</think>", "\n\n", "Hi"], [1, 2, 3, 3, 3, 3]),
        (TAGS, ["<", "think", ">", "a", "</", "think", ">", "Hi"], [0, 0, 1, 2, 3, 4, 4, 4]),
        (INSIDE, ["a", "b", "</think>", "Hi"], [1, 2, 2, 2]),
        (INSIDE, ["a", "</think>", "Hi\n", "<think>", "b", "</think>", "Ho"], [1, 1, 1, 2, 3, 3, 3]),
        (INSIDE, ["the `", "</think>", "` tag", "</think>", "Hi"], [1, 2, 3, 3, 3]),
        (INSIDE, ["<tool_call>", "</tool_call>", "</think>"], [1, 2, 2]),
        (INSIDE, ["a</think>Hi"], [0]),
        (
            HARMONY,
            ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final",
             "<|message|>", "Hi"],
            [0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2],
        ),
    ],
)  # fmt: skip
def test_a_token_counts_if_the_text_ends_inside_a_thought(
    thoughts: Thoughts, tokens: list[str], expected: list[int]
) -> None:
    assert counts(thoughts, tokens) == expected


def test_a_token_may_end_inside_a_character() -> None:
    tracker = ThoughtTracker(INSIDE)
    for raw in (b"\xe2\x98", b"\x83", b"\xff", b"</think>", b"\xe2"):
        tracker.feed(raw)
    assert (tracker.tokens, tracker.thinking) == (3, False)


@given(st.lists(st.sampled_from(["<", "think", ">", "</think>", "<think>", "`", "a", " ", "\n", "é"]), max_size=12))
def test_the_state_does_not_depend_on_the_tokens(tokens: list[str]) -> None:
    """So that it can be had again from the text alone, where tokens are taken back."""
    one, other = ThoughtTracker(INSIDE), ThoughtTracker(INSIDE, tokens=5)
    for token in tokens:
        one.feed(token.encode())
    other.feed("".join(tokens).encode(), counts=False)
    assert one.thinking == other.thinking
    assert other.tokens == 5


def test_a_budget_is_spent_inside_a_thought_only() -> None:
    tracker = ThoughtTracker(msgspec.structs.replace(INSIDE, budget=2))
    spent = []
    for token in ["a", "b", "c", "</think>", "Hi\n", "<think>"]:
        tracker.feed(token.encode())
        spent.append(tracker.spent)
    assert spent == [False, True, True, False, False, True]


def test_no_thought_ends_inside_a_character() -> None:
    tracker = ThoughtTracker(msgspec.structs.replace(INSIDE, budget=1))
    spent = []
    for raw in (b"\xe2", b"\x98", b"\x83", b"\xe2", b"a"):
        tracker.feed(raw)
        spent.append(tracker.spent)
    assert spent == [False, False, True, False, True]


def test_a_budget_of_nothing_is_spent_before_the_first_token() -> None:
    assert ThoughtTracker(msgspec.structs.replace(INSIDE, budget=0)).spent
    assert not ThoughtTracker(msgspec.structs.replace(TAGS, budget=0)).spent
    assert not ThoughtTracker(INSIDE).spent


@pytest.mark.parametrize("message", ["", "Enough.", "\n\nEnough.\n"])
@pytest.mark.parametrize("thoughts", [TAGS, HARMONY, GLIMMER], ids=["tags", "harmony", "glimmer"])
@pytest.mark.parametrize("thought", ["", "Well", 'He said "', "`", "a line\n"])
def test_the_ending_ends_a_thought_and_holds_the_message(thoughts: Thoughts, message: str, thought: str) -> None:
    thoughts = msgspec.structs.replace(thoughts, inside=True, message=message, budget=0)
    tracker = ThoughtTracker(thoughts)
    end = ending(thoughts)
    assert end.startswith(message)
    tracker.feed((thought + end).encode())
    assert not tracker.thinking
    tracker.feed(b"Hi")
    assert not tracker.thinking


def test_blanks_of_a_message_take_the_place_of_those_before_the_tag() -> None:
    assert ending(TAGS) == "\n</think>\n\n"
    assert ending(msgspec.structs.replace(TAGS, message="Enough.")) == "Enough.\n</think>\n\n"
    assert ending(msgspec.structs.replace(TAGS, message="Enough.\n")) == "Enough.\n</think>\n\n"
