"""Jobs take turns, and steps stay within their tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from backends.embeddings.batches import Batches, Job


def job(name: str, tokens: Sequence[int], key: Hashable = "key") -> Job[str, str]:
    return Job(name, key, [f"{name}{place}" for place in range(len(tokens))], tokens)


def added(tokens: int, *jobs: Job[str, str]) -> Batches[str, str]:
    batches = Batches[str, str](tokens)
    for each in jobs:
        batches.add(each)
    return batches


def steps(batches: Batches[str, str]) -> list[list[str]]:
    """The values of each step, all of which are finished."""
    taken = []
    while step := batches.next():
        taken.append([piece.value for pieces in step.values() for piece in pieces])
        for each, pieces in step.items():
            each.finish(pieces, [piece.value.upper() for piece in pieces])
    return taken


async def test_a_lone_job_fills_each_step_with_the_longest_first() -> None:
    lone = job("a", [1, 4, 2, 4, 1])
    assert steps(added(8, lone)) == [["a1", "a3"], ["a2", "a0", "a4"]]
    assert await lone.done == ["A0", "A1", "A2", "A3", "A4"]


async def test_a_small_job_is_in_the_next_step_of_a_large_one() -> None:
    large, small = job("large", [1] * 100), job("small", [1])
    batches = added(10, large)
    first = batches.next()
    large.finish(first[large], ["" for _ in first[large]])
    batches.add(small)
    assert small in batches.next()


async def test_jobs_that_cannot_be_computed_together_take_turns() -> None:
    one, other = job("a", [1] * 4, "texts"), job("b", [1] * 4, "ids")
    assert steps(added(2, one, other)) == [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["b2", "b3"]]


async def test_what_is_longer_than_a_step_has_one_for_itself() -> None:
    assert steps(added(8, job("a", [20, 30, 1]))) == [["a1"], ["a0"], ["a2"]]


async def test_padding_counts() -> None:
    """Three texts of 4, 1 and 1 tokens are computed as three of 4."""
    assert steps(added(11, job("a", [4, 1, 1]))) == [["a0", "a1"], ["a2"]]


async def test_no_more_is_computed_of_a_job_that_has_failed_or_is_removed() -> None:
    failed, removed, other = job("a", [1] * 4), job("b", [1] * 4), job("c", [1] * 2)
    batches = added(2, failed, removed, other)
    assert list(batches.next()) == [failed, removed]
    failed.fail(ValueError("over"))
    batches.remove(removed)
    batches.remove(removed)
    assert steps(batches) == [["c0", "c1"]]
    assert isinstance(failed.done.exception(), ValueError)


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), max_size=5), st.integers(1, 30))
async def test_every_value_is_computed_once_within_the_tokens_of_a_step(jobs: list[list[int]], limit: int) -> None:
    given_jobs = [job("abcde"[place], tokens, place % 2) for place, tokens in enumerate(jobs)]
    batches = added(limit, *given_jobs)
    while step := batches.next():
        pieces = [piece for each in step.values() for piece in each]
        assert len(pieces) == 1 or len(pieces) * max(piece.tokens for piece in pieces) <= limit
        assert len({each.key for each in step}) == 1
        for each, own in step.items():
            each.finish(own, [piece.value.upper() for piece in own])
    for each in given_jobs:
        assert await each.done == [f"{each.request_id}{place}".upper() for place in range(len(each.done.result()))]
    assert [len(each.done.result()) for each in given_jobs] == list(map(len, jobs))
