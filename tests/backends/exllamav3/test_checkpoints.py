"""Checkpoint arithmetic, alone and beside the real engine."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.exllamav3.checkpoints import (
    DEFAULT_INTERVAL,
    DEFAULT_INTERVAL_PP,
    CheckpointIntervals,
    CheckpointPlan,
    advise,
    checkpoint_info,
    describe,
    observe,
    plan,
)
from backends.exllamav3.engine import AsyncGenerator
from backends.exllamav3.model import ExllamaV3Container
from common.generation import Finish, GenerationRequest
from common.sampling import SamplingParameters
from tests.scripted import load_settings

MIB = 1024**2
PROMPT_TOKENS = 5266
EDITS = (276, 1321, 2024, 2639, 3769, 4373)

# Measured on the engine: (chunk_size, interval_pp, interval) -> marks, tokens prefilled again per edit.
EDIT_COST = {
    (1024, 32768, 2048): ((4096, 5120), (5265, 5265, 5265, 5265, 5265, 1169)),
    (1024, 2048, 2048): ((2048, 4096, 5120), (5265, 5265, 5265, 3217, 3217, 1169)),
    (1024, 1024, 2048): ((1024, 2048, 3072, 5120), (5265, 4241, 4241, 3217, 2193, 2193)),
    (1024, 1024, 1024): ((1024, 2048, 3072, 4096, 5120), (5265, 4241, 4241, 3217, 2193, 1169)),
    (2048, 32768, 2048): ((2048, 4096, 5120), (5265, 5265, 5265, 3217, 3217, 1169)),
    (2048, 256, 2048): ((2048, 4096, 5120), (5265, 5265, 5265, 3217, 3217, 1169)),
    (512, 512, 512): (tuple(range(512, 5121, 512)), (5265, 4241, 3729, 2705, 1681, 1169)),
    (256, 256, 256): (tuple(range(256, 5121, 256)), (5009, 3985, 3473, 2705, 1681, 913)),
}


def unlimited(prompt_tokens: int, chunk_size: int, interval_pp: int, interval: int) -> CheckpointPlan:
    return plan(prompt_tokens, chunk_size, interval, interval_pp, checkpoint_bytes=1, budget_bytes=10**6)


# --- settings and advice --------------------------------------------------------------------------------------------


def test_only_what_is_set_reaches_the_engine() -> None:
    assert CheckpointIntervals().engine_arguments() == {}
    assert CheckpointIntervals(interval=1024).engine_arguments() == {"recurrent_checkpoint_interval": 1024}
    assert CheckpointIntervals(interval_pp=2048).engine_arguments() == {"recurrent_checkpoint_interval_pp": 2048}
    assert CheckpointIntervals(256, 512).engine_arguments() == {
        "recurrent_checkpoint_interval": 256,
        "recurrent_checkpoint_interval_pp": 512,
    }


def advice(interval: int | None = None, interval_pp: int | None = None, **situation: Any) -> list[str]:
    defaults = {"recurrent": True, "chunk_size": 1024, "cache_size": 65536, "default_interval": DEFAULT_INTERVAL}
    return advise(CheckpointIntervals(interval, interval_pp), **(defaults | situation))


def test_nothing_set_needs_no_advice() -> None:
    assert advice() == []
    assert advice(recurrent=False, chunk_size=2048, cache_size=256) == []


@pytest.mark.parametrize(
    ("interval", "interval_pp", "chunk_size"),
    [(1024, 1024, 1024), (2048, 2048, 1024), (None, 2048, 1024), (1024, None, 512)],
)
def test_settings_that_do_what_they_say_need_no_advice(
    interval: int | None, interval_pp: int | None, chunk_size: int
) -> None:
    assert advice(interval, interval_pp, chunk_size=chunk_size) == []


def test_a_model_without_recurrent_layers_is_named_as_the_only_reason() -> None:
    (sentence,) = advice(interval=256, interval_pp=512, recurrent=False, cache_size=256)
    assert "recurrent_checkpoint_interval and recurrent_checkpoint_interval_pp have no effect" in sentence
    (sentence,) = advice(interval_pp=512, recurrent=False)
    assert sentence.startswith("recurrent_checkpoint_interval_pp has no effect")


@pytest.mark.parametrize(
    ("value", "chunk_size", "apart", "better"),
    [(512, 2048, 2048, 512), (1024, 1000, 1536, 512), (1280, 1024, 2048, 256)],
)
def test_an_interval_off_the_chunk_grid_names_the_chunk_size_that_would_do(
    value: int, chunk_size: int, apart: int, better: int
) -> None:
    (sentence,) = advice(interval=value, interval_pp=value, chunk_size=chunk_size)
    assert f"recurrent_checkpoint_interval and recurrent_checkpoint_interval_pp are {value}," in sentence
    assert f"with chunk_size {chunk_size} they are {apart} tokens apart" in sentence
    assert f"Set chunk_size to {better} " in sentence
    # The advice is true: with that chunk size the marks are where they were wanted.
    marks = unlimited(20001, better, value, value).marks
    assert marks[:-1] == tuple(range(value, marks[-1], value))


def test_only_the_interval_for_the_prompt_set_loses_the_mark_near_its_end() -> None:
    (sentence,) = advice(interval_pp=1024)
    assert "recurrent_checkpoint_interval is left at 2048" in sentence
    assert "last 2048 tokens" in sentence
    assert "Set both" in sentence


def test_the_default_interval_of_the_model_counts() -> None:
    assert advice(interval_pp=2048, default_interval=2048) == []
    (sentence,) = advice(interval_pp=2048, default_interval=6144)
    assert "left at 6144" in sentence


@pytest.mark.parametrize("key", ["interval", "interval_pp"])
def test_an_interval_as_large_as_the_cache_never_comes_to_a_mark(key: str) -> None:
    (sentence,) = advice(**{key: 4096}, cache_size=4096, default_interval=256)
    assert f"recurrent_checkpoint_{key} is 4096, and the cache holds 4096 tokens" in sentence


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", EDIT_COST, ids=lambda settings: "-".join(map(str, settings)))
def test_plan_equals_the_measured_edit_cost(settings: tuple[int, int, int]) -> None:
    marks, replays = EDIT_COST[settings]
    computed = unlimited(PROMPT_TOKENS, *settings)
    assert computed.marks == marks
    assert tuple(map(computed.replay, EDITS)) == replays
    assert computed.replay(PROMPT_TOKENS) == 145  # the same prompt again


def test_plan_counts_bytes_and_keeps_the_newest_marks_that_fit() -> None:
    computed = plan(PROMPT_TOKENS, 1024, 1024, 1024, checkpoint_bytes=148 * MIB, budget_bytes=2 * 148 * MIB + 147 * MIB)
    assert computed.bytes == 5 * 148 * MIB
    assert computed.capacity == 2
    assert computed.kept == (4096, 5120)
    assert computed.replay(3769) == 5265
    assert computed.replay(4373) == 1169


def test_plan_without_room_for_one_checkpoint_keeps_none() -> None:
    computed = plan(PROMPT_TOKENS, 1024, 1024, 1024, checkpoint_bytes=2, budget_bytes=1)
    assert computed.capacity == 0
    assert computed.kept == ()
    assert computed.replay(PROMPT_TOKENS) == PROMPT_TOKENS - 1


@pytest.mark.parametrize("sizes", [(0, 1024, 1), (10, 255, 1), (10, 1024, 0)])
def test_plan_refuses_impossible_sizes(sizes: tuple[int, int, int]) -> None:
    prompt_tokens, chunk_size, checkpoint_bytes = sizes
    with pytest.raises(ValueError, match="must be at least"):
        plan(prompt_tokens, chunk_size, 256, 256, checkpoint_bytes=checkpoint_bytes, budget_bytes=1)


pages = st.integers(1, 40).map(lambda count: count * 256)


@given(st.integers(1, 20000), st.integers(256, 8192), pages, pages, st.integers(0, 20))
def test_plan_holds_together(prompt_tokens: int, chunk_size: int, interval: int, interval_pp: int, budget: int) -> None:
    computed = plan(prompt_tokens, chunk_size, interval, interval_pp, checkpoint_bytes=1, budget_bytes=budget)
    assert list(computed.marks) == sorted(set(computed.marks))
    assert all(mark % 256 == 0 and 0 < mark < prompt_tokens for mark in computed.marks)
    assert len(computed.kept) == min(budget, len(computed.marks))
    overheads = [position - computed.resume(position) for position in range(prompt_tokens)]
    assert max(overheads) == computed.worst_overhead


# --- beside the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def container(tiny_hybrid: Path) -> Iterator[ExllamaV3Container]:
    """The tiny hybrid with its weights loaded and no generator."""
    loaded = ExllamaV3Container.create(tiny_hybrid, load_settings(cache_size=16384, max_seq_len=16384))
    for _ in loaded.load():
        pass
    yield loaded
    loaded.model.unload()


@asynccontextmanager
async def generating(container: ExllamaV3Container, **arguments: int) -> AsyncIterator[Any]:
    """The engine's generator with these arguments, over the loaded model."""
    container.generator = AsyncGenerator(
        model=container.model, cache=container.cache, tokenizer=container.tokenizer, max_batch_size=4, **arguments
    )
    try:
        yield container.generator.generator
    finally:
        await container.generator.close()
        container.generator = None


async def prefilled(container: ExllamaV3Container, prompt: list[int]) -> int:
    """Serve the prompt; returns the tokens that went through prefill."""
    request = GenerationRequest(prompt=prompt, sampling=SamplingParameters(temperature=0.0), max_tokens=1)
    async for event in container.start(request).events():
        if isinstance(event, Finish):
            return event.usage.prompt_tokens - event.usage.cached_tokens - 1
    raise AssertionError("no finish")


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 1000) for _ in range(length)]


def edited(prompt: list[int], position: int) -> list[int]:
    return [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]


def schedules() -> Iterator[tuple[int, int, int, int, int]]:
    """prompt_tokens, chunk_size, interval_pp, interval, checkpoints that fit."""
    plenty = 1000
    for prompt_tokens in (1, 2, 256, 257, 258, 512, 513, 769, 2048, 2049):
        yield prompt_tokens, 512, 512, 512, plenty
    yield 2049, 2048, 2048, 2048, plenty
    yield 2000, 1000, 1024, 1024, plenty  # chunks of 768
    yield 1537, 512, 32768, 2048, 0
    rng = random.Random(11)
    for _ in range(10):
        yield (
            rng.randint(1, 2500),
            rng.choice((256, 512, 768, 1000, 1024, 1500, 2048)),
            256 * rng.randint(1, 12),
            256 * rng.randint(1, 10),
            rng.choice((plenty, plenty, 3, 2, 1)),
        )


@pytest.mark.anyio
@pytest.mark.parametrize("schedule", [*schedules()], ids=lambda schedule: "-".join(map(str, schedule)))
async def test_plan_equals_what_the_engine_does(
    container: ExllamaV3Container, schedule: tuple[int, int, int, int, int]
) -> None:
    prompt_tokens, chunk_size, interval_pp, interval, capacity = schedule
    rng = random.Random(prompt_tokens)
    prompt = random_prompt(rng, prompt_tokens)
    one = sum(layer.get_checkpoint_size() for layer in container.cache.get_all_recurrent_layers().values())
    budget = capacity * one + one - 1
    computed = plan(prompt_tokens, chunk_size, interval, interval_pp, checkpoint_bytes=one, budget_bytes=budget)

    async with generating(
        container,
        max_chunk_size=chunk_size,
        recurrent_checkpoint_interval=interval,
        recurrent_checkpoint_interval_pp=interval_pp,
        recurrent_cache_size=budget,
    ) as generator:
        assert await prefilled(container, prompt) == prompt_tokens - 1
        state = observe(generator)
        assert state is not None
        assert state.info.capacity == computed.capacity
        assert state.positions == computed.kept
        assert await prefilled(container, prompt) == computed.replay(prompt_tokens)
        edit = rng.randrange(prompt_tokens)
        assert await prefilled(container, edited(prompt, edit)) == computed.replay(edit)


@pytest.mark.anyio
async def test_the_size_of_a_checkpoint_is_known_before_there_is_one(container: ExllamaV3Container) -> None:
    async with generating(container, max_chunk_size=512, recurrent_cache_size=10 * MIB) as generator:
        before = checkpoint_info(generator)
        assert before is not None
        assert (before.interval, before.interval_pp) == (DEFAULT_INTERVAL, DEFAULT_INTERVAL_PP)
        await prefilled(container, random_prompt(random.Random(1), 600))
        (held,) = generator.recurrent_cache.values()
        assert before.bytes == held["checkpoint_size"] == generator.recurrent_cache.current_size
        assert before.capacity == 10 * MIB // before.bytes
        assert checkpoint_info(generator) == before


@pytest.mark.anyio
async def test_observe_follows_what_is_held_and_evicted(container: ExllamaV3Container) -> None:
    info = None
    async with generating(container, max_chunk_size=256) as generator:
        info = checkpoint_info(generator)
    assert info is not None
    async with generating(
        container,
        max_chunk_size=256,
        recurrent_checkpoint_interval=256,
        recurrent_checkpoint_interval_pp=256,
        recurrent_cache_size=2 * info.bytes,
    ) as generator:
        empty = observe(generator)
        assert empty is not None
        assert (empty.positions, empty.held_bytes, empty.evictions) == ((), 0, 0)
        await prefilled(container, random_prompt(random.Random(2), 1100))
        full = observe(generator)
        assert full is not None
        assert full.positions == (768, 1024)
        assert full.held_bytes == 2 * info.bytes
        assert (full.evictions, full.evictions_usable) == (2, 2)
        assert describe(generator) == (
            "Using recurrent checkpoint intervals: 256 tokens in generated text and at the end of a prompt, "
            "256 tokens in the rest of a prompt."
        )


@pytest.mark.anyio
async def test_there_is_nothing_to_observe_without_recurrent_layers(tiny_llama: Path) -> None:
    dense = ExllamaV3Container.create(tiny_llama, load_settings(cache_size=1024, max_seq_len=1024))
    for _ in dense.load():
        pass
    async with generating(dense, max_chunk_size=256) as generator:
        assert observe(generator) is None
        assert checkpoint_info(generator) is None
    dense.model.unload()


def test_the_module_needs_no_engine() -> None:
    code = (
        "import sys; import backends.exllamav3.checkpoints; "
        "sys.exit(', '.join({'torch', 'exllamav3'} & sys.modules.keys()) or None)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
