"""Earlier prompts by owner: which one is nearest, and which are forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

from backends.exllamav3.prompt_history import PromptHistory, common_length
from common.caching import EVERYBODY


def nearest(history: PromptHistory, owner: str, ids: list[int]) -> tuple[list[int], int] | None:
    found = history.nearest(owner, ids)
    return None if found is None else (found.ids.tolist(), found.common)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [2, 1], 0),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3], 3),
    ],
)
def test_common_length(one: list[int], other: list[int], common: int) -> None:
    arrays = np.array(one, dtype=np.int64), np.array(other, dtype=np.int64)
    assert common_length(*arrays) == common_length(*reversed(arrays)) == common


def test_the_nearest_begins_most_like_the_prompt() -> None:
    history = PromptHistory()
    assert history.nearest("a", [1, 2]) is None
    for ids in ([1, 2, 3, 4], [1, 2, 9], [7]):
        history.remember("a", ids)
    assert nearest(history, "a", [1, 2, 3, 5]) == ([1, 2, 3, 4], 3)
    assert nearest(history, "a", [1, 2, 9, 9]) == ([1, 2, 9], 3)
    assert nearest(history, "a", [7, 7]) == ([7], 1)
    assert nearest(history, "a", [8]) is None
    assert nearest(history, "a", []) is None


def test_the_latest_of_equally_near_ones_counts() -> None:
    history = PromptHistory()
    for last in (5, 6, 5):
        history.remember("a", [1, 2, last])
    assert nearest(history, "a", [1, 2, 7]) == ([1, 2, 5], 2)


def test_owners_see_their_own_prompts_only_and_everybody_sees_all() -> None:
    history = PromptHistory()
    history.remember("a", [1, 2, 3])
    history.remember(EVERYBODY, [1, 2, 3, 4])
    assert history.nearest("b", [1, 2, 3, 4]) is None
    assert nearest(history, "a", [1, 2, 3, 4]) == ([1, 2, 3], 3)
    assert nearest(history, EVERYBODY, [1, 2, 3, 9]) == ([1, 2, 3, 4], 3)
    history.remember("b", [8, 8])
    assert nearest(history, EVERYBODY, [8, 9]) == ([8, 8], 1)


def test_a_conversation_is_one_entry() -> None:
    history = PromptHistory(max_entries=2)
    history.remember("a", [9, 9])
    for length in range(1, 20):
        history.remember("a", list(range(length)))
    history.remember("a", [0, 1])  # asked again from its beginning
    assert nearest(history, "a", [9]) == ([9, 9], 1)
    assert nearest(history, "a", list(range(30))) == (list(range(19)), 19)


def test_what_was_unused_for_longest_is_forgotten_first() -> None:
    history = PromptHistory(max_entries=2)
    history.remember("a", [1, 1])
    history.remember("a", [2, 2])
    history.remember("a", [1, 1])
    history.remember("a", [3, 3])
    assert [history.nearest("a", [first]) is not None for first in (1, 2, 3)] == [True, False, True]


def test_owners_are_bounded() -> None:
    history = PromptHistory(max_owners=2)
    for owner in ("a", "b", "a", "c"):
        history.remember(owner, [1, 2])
    assert [history.nearest(owner, [1]) is not None for owner in ("a", "b", "c")] == [True, False, True]


def test_tokens_are_bounded_for_all_together() -> None:
    history = PromptHistory(max_tokens=10)
    history.remember("a", [1] * 4)
    history.remember("b", [2] * 4)
    history.remember("b", [3] * 4)
    assert history.nearest("a", [1]) is None
    assert nearest(history, "b", [2]) == ([2] * 4, 1)
    history.remember("b", [4] * 30)
    assert nearest(history, "b", [4]) == ([4] * 30, 1)
    assert history.nearest("b", [3]) is None
    history.remember("c", [5] * 8)
    assert history.nearest("b", [4]) is None
    assert nearest(history, "c", [5]) == ([5] * 8, 1)


def test_bounds_hold_whatever_comes() -> None:
    numbers = random.Random(0)
    history = PromptHistory(max_owners=3, max_entries=4, max_tokens=60)
    for _ in range(500):
        ids = numbers.choices([1, 2], k=numbers.randrange(12))
        owner = numbers.choice("abcde")
        history.remember(owner, ids)
        if ids:
            assert nearest(history, owner, ids) is not None
            assert history.nearest(owner, ids).common == len(ids)  # type: ignore[union-attr]  # said above
        entries = [entry.tolist() for of_owner in history._entries.values() for entry in of_owner]
        assert len(history._entries) <= 3
        assert all(len(of_owner) <= 4 for of_owner in history._entries.values())
        assert sum(map(len, entries)) == history._tokens <= 60
        assert all(entries)


def test_clear_forgets_everything() -> None:
    history = PromptHistory(max_tokens=5)
    history.remember("a", [1, 2, 3])
    history.clear()
    assert history.nearest("a", [1]) is None
    history.remember("a", [4] * 5)
    assert nearest(history, "a", [4]) == ([4] * 5, 1)


def test_ids_of_images_may_be_ever_so_large() -> None:
    history = PromptHistory()
    history.remember("a", [2**40])
    found = history.nearest("a", [2**40])
    assert found is not None
    assert (found.ids.tolist(), found.ids.nbytes) == ([2**40], 8)
