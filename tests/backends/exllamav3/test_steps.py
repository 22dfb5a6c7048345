"""How the events of the engine's steps go to the server: those of a step together, before the next one."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends import messages
from backends.exllamav3.engine import Generator
from backends.messages import FromEngine, Produced
from backends.worker import Worker
from common.generation import Finish, GenerationRequest, Prefill, TextDelta
from tests.containers import GREEDY, loaded

pytestmark = pytest.mark.anyio

TOKENS = 12


class Pipe(io.BytesIO):
    """
    Attributes:
        steps: of the engine so far.
        writes: the messages that each flush let go, and the steps before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.writes: list[tuple[int, list[FromEngine]]] = []

    def flush(self) -> None:
        bodies = messages.take_frames(bytearray(self.getvalue()))
        self.writes.append((self.steps, [messages.from_engine_decoder.decode(body) for body in bodies]))
        self.seek(0)
        self.truncate()


async def test_a_step_is_one_write(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    iterate = Generator.iterate

    def counted(generator: Generator) -> Any:
        pipe.steps += 1
        return iterate(generator)

    monkeypatch.setattr(Generator, "iterate", counted)
    request = GenerationRequest(prompt=[300, 301, 302], sampling=GREEDY, max_tokens=TOKENS)
    async with loaded(tiny_llama) as container:
        worker = Worker(lambda *arguments: container, io.FileIO(0, closefd=False), pipe)
        container.on_results = worker._flush_last
        for number in range(4):
            prompt = [300 + number, 301, 302]
            worker._start(container, f"{number}", msgspec.structs.replace(request, prompt=prompt))
        await asyncio.gather(*worker._tasks.values())
        await asyncio.sleep(0)
    produced = [(step, [message for message in write if isinstance(message, Produced)]) for step, write in pipe.writes]
    steps = [step for step, write in produced if any(isinstance(message.event, TextDelta) for message in write)]
    assert len(steps) <= TOKENS
    assert len(set(steps)) == len(steps), "what a step gave has waited for the next one"
    for number in range(4):
        events = [message.event for _, write in produced for message in write if message.id == f"{number}"]
        assert sum(len(event.token_ids) for event in events if isinstance(event, TextDelta)) == TOKENS
        assert [isinstance(event, Finish) for event in events] == [False] * (len(events) - 1) + [True]


async def test_a_short_answer_reserves_no_more_than_it_needs(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        assert container.generator is not None
        for max_tokens, pages in ((8, 1), (600, 3), (0, 9)):
            request = GenerationRequest(prompt=[300] * 10, sampling=GREEDY, max_tokens=max_tokens)
            job = container.start(request)
            (queued,) = container.generator.generator.pending_jobs
            assert queued.sequences[0].new_unique_pages == pages
            await job.cancel()


@pytest.mark.parametrize(("length", "waits"), [(250, False), (700, True)])  # a chunk has 1,024; a pass 128 at least
@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_hybrid"])
async def test_short_prompts_that_come_beside_an_answer_are_processed_together(
    request: pytest.FixtureRequest, fixture: str, length: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, done = 0, dict[int, int]()
    iterate = Generator.iterate

    def counted(generator: Generator) -> Any:
        nonlocal steps
        steps += 1
        return iterate(generator)

    monkeypatch.setattr(Generator, "iterate", counted)

    async def serve(number: int, length: int) -> None:
        prompt = [300 + number] * length
        job = container.start(GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=40))
        async for event in job.events():
            if isinstance(event, Prefill) and event.done_tokens == length:
                done.setdefault(number, steps)

    directory: Path = request.getfixturevalue(fixture)
    async with loaded(directory) as container:
        running = asyncio.create_task(serve(0, 40))
        while 0 not in done:
            await asyncio.sleep(0)
        await asyncio.gather(serve(1, 40), serve(2, 200), serve(3, length))
        await running
    assert done[1] == done[2]
    assert (done[3] > done[1]) == waits
