from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.generation import EngineJob, PromptJob
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.turns import Turn, Turns
from common.generation import Finish, GenerationRequest, Prefill
from tests.containers import GREEDY, loaded

# --- the arithmetic ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    owner: str
    number: int  # among those of its owner
    turn: Turn = field(init=False)

    def __str__(self) -> str:
        return f"{self.owner}{self.number}"


class Queue:
    """An engine with one slot."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.jobs: list[Job] = []
        self.order: list[Job] = []
        self._asked: Counter[str] = Counter()

    def add(self, *owners: str) -> None:
        for owner in owners:
            self._asked[owner] += 1
            job = Job(owner, self._asked[owner])
            self.jobs.append(job)
            self.turns.queued(job, self.jobs)

    def start(self, count: int = 1) -> str:
        """Which jobs start next."""
        started = [self.jobs.pop(0) for _ in range(min(count, len(self.jobs)))]
        for job in started:
            self.turns.started(job)
        self.order += started
        return " ".join(map(str, started))

    def withdraw(self, job: Job) -> None:
        self.jobs.remove(job)
        self.turns.withdrawn(job, self.jobs)


def test_one_owner_is_served_in_order() -> None:
    queue = Queue()
    queue.add(*"aaa")
    assert queue.start() == "a1"
    queue.add(*"aa")
    assert queue.start(9) == "a2 a3 a4 a5"


def test_who_comes_late_is_next_but_for_one_of_each_other() -> None:
    queue = Queue()
    queue.add(*"aaaaaabbb")
    assert queue.start(3) == "a1 b1 a2"
    queue.add(*"ccc")
    assert queue.start(9) == "b2 c1 a3 b3 c2 a4 c3 a5 a6"


def test_idle_time_is_not_saved_up() -> None:
    queue = Queue()
    queue.add(*"aab")
    assert queue.start(9) == "a1 b1 a2"
    queue.add(*"aaaaaa")
    queue.start(3)
    queue.add(*"bbb")
    assert queue.start(9) == "b2 a6 b3 a7 b4 a8"


def test_what_is_withdrawn_takes_no_turn() -> None:
    queue = Queue()
    queue.add(*"aaaaaa")
    queue.start()
    for job in queue.jobs[:3]:
        queue.withdraw(job)
    queue.add(*"bbb")
    queue.add("a")
    assert queue.start(9) == "b1 a5 b2 a6 b3 a7"


def test_a_job_that_is_queued_again_stays_in_front() -> None:
    queue = Queue()
    queue.add(*"ab")
    queue.start()
    queue.jobs.insert(0, queue.order[0])  # a1's next segment, as the engine does it
    queue.add(*"ba")
    assert queue.start(9) == "a1 b1 a2 b2"


def test_owners_that_have_left_are_forgotten() -> None:
    queue = Queue()
    for number in range(100):
        queue.add(f"owner {number}", "a")
        queue.start(2)
    assert len(queue.turns._last) < 4


STEPS = st.lists(st.one_of(st.sampled_from("abcd"), st.just("start"), st.integers(0, 30)), max_size=80)


@given(STEPS)
def test_nobody_who_waits_sees_two_of_another_start(steps: list[str | int]) -> None:
    queue = Queue()
    # By owner that waits: what has started since its own last job, or since it waits.
    seen: dict[str, Counter[str]] = {}
    for step in [*steps, *["start"] * len(steps)]:
        if step == "start":
            if not queue.jobs:
                continue
            started = queue.jobs[0]
            queue.start()
            for counts in seen.values():
                counts[started.owner] += 1
            seen[started.owner] = Counter()
        elif isinstance(step, str):
            queue.add(step)
        elif queue.jobs:
            queue.withdraw(queue.jobs[step % len(queue.jobs)])
        waiting = {job.owner for job in queue.jobs}
        seen = {owner: seen.get(owner, Counter()) for owner in waiting}
        for owner, counts in seen.items():
            assert all(count <= 1 for other, count in counts.items() if other != owner), (owner, counts)
        for owner in waiting:
            numbers = [job.number for job in queue.jobs if job.owner == owner]
            assert numbers == sorted(numbers)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def llama_with_one_slot(tiny_llama: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_llama, max_batch_size=1, chunk_size=256, output_chunking=True) as container:
        yield container


@pytest.fixture
def one_slot(llama_with_one_slot: ExllamaV3Container) -> ExllamaV3Container:
    """As if it had just been loaded."""
    llama_with_one_slot.turns = Turns()
    return llama_with_one_slot


class Asker:
    """Asks for answers side by side, and writes down in which order they begin and end."""

    def __init__(self, container: ExllamaV3Container) -> None:
        self.container = container
        self.order: list[str] = []
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, owner: str, count: int, max_tokens: int = 2) -> None:
        for number in range(count):
            request = GenerationRequest(prompt=f"{owner} {number}", sampling=GREEDY, max_tokens=max_tokens, owner=owner)
            self.tasks.append(asyncio.create_task(self._read(owner, self.container.start(request))))

    async def _read(self, owner: str, job: EngineJob | PromptJob) -> None:
        first = True
        try:
            async for event in job.events():
                if first and isinstance(event, Prefill):
                    first = False
                    self.order.append(owner)
                if isinstance(event, Finish):
                    self.ended.append(owner)
        finally:
            await job.cancel()

    async def finished(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_two_keys_take_turns(one_slot: ExllamaV3Container) -> None:
    asker = Asker(one_slot)
    asker.ask("a", 6)
    asker.ask("b", 2)
    await asker.finished()
    assert "".join(asker.order) == "ababaaaa"


async def test_a_cancelled_job_takes_no_turn(one_slot: ExllamaV3Container) -> None:
    asker = Asker(one_slot)
    asker.ask("a", 6)
    asker.ask("b", 2)
    await asyncio.sleep(0)  # so that they read
    for task in asker.tasks[1:4]:
        task.cancel()
    await asker.finished()
    assert "".join(asker.order) == "ababa"


async def test_an_answer_in_segments_keeps_its_turn(one_slot: ExllamaV3Container) -> None:
    asker = Asker(one_slot)
    asker.ask("a", 1, max_tokens=300)  # a segment is a chunk of 256 tokens
    asker.ask("b", 2)
    asker.ask("a", 1)
    await asker.finished()
    assert "".join(asker.order) == "abab"
    assert "".join(asker.ended) == "abab"
