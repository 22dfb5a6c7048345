"""The thoughts of a script: what is played of them, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from common.generation import Event, Finish, GenerationRequest, TextDelta, Thoughts
from common.sampling import SamplingParameters
from tests.scripted_worker import Play, ScriptedJob

TAGS: dict[str, Any] = {"dialect": "tags", "start": "<think>", "end": "</think>"}
SCRIPT = "abcdef</think>\n\nHi"


async def played(chunks: list[str], max_tokens: int = 1000, **thoughts: Any) -> tuple[str, Finish]:
    request = GenerationRequest(prompt="", sampling=SamplingParameters(), thoughts=Thoughts(**(TAGS | thoughts)))
    events: list[Event] = [event async for event in ScriptedJob(Play(chunks=chunks), request, "", max_tokens).events()]
    *deltas, finish = events
    assert isinstance(finish, Finish)
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)), finish


@pytest.mark.parametrize("chunks", [[SCRIPT], list(SCRIPT), ["abc", "def</th", "ink>\n\nHi"]], ids=["whole", "1", "3"])
@pytest.mark.parametrize(
    ("thoughts", "text", "tokens"),
    [
        ({}, SCRIPT, 0),
        ({"inside": True}, SCRIPT, 13),
        ({"inside": True, "budget": 2}, "ab\n</think>\n\n\n\nHi", 10),
        ({"inside": True, "budget": 0, "message": "So."}, "So.\n</think>\n\n\n\nHi", 11),
        ({"inside": True, "budget": 6}, "abcdef\n</think>\n\n\n\nHi", 14),
        ({"inside": True, "budget": 100}, SCRIPT, 13),
    ],
)
async def test_a_thought_is_ended_at_its_budget(
    chunks: list[str], thoughts: dict[str, Any], text: str, tokens: int
) -> None:
    heard, finish = await played(chunks, **thoughts)
    assert heard == text
    assert finish.usage.reasoning_tokens == tokens
    assert finish.usage.completion_tokens == len(text)
    assert finish.reason == "stop"


async def test_thoughts_of_the_answer_are_ended_too() -> None:
    text, finish = await played(["<think>abc</think>Hi\n<think>d</think>Ho"], budget=3)
    assert text == "<think>ab\n</think>\n\nHi\n<think>\n</think>\n\nHo"
    assert finish.usage.reasoning_tokens == 3 + 8 + 1 + 8


async def test_the_limit_of_tokens_may_cut_the_ending() -> None:
    text, finish = await played(["abcd"], inside=True, budget=2, max_tokens=5)
    assert text == "ab\n</"
    assert (finish.reason, finish.usage.reasoning_tokens) == ("length", 5)
