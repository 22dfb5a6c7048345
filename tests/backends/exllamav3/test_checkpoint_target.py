"""From a target to intervals and a chunk size: arithmetic, and what the real engine does with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from backends.exllamav3.checkpoint_target import choose
from backends.exllamav3.checkpoints import CheckpointIntervals, plan_for
from backends.exllamav3.engine import AsyncGenerator
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.prefill_speed import measure_prefill_speed
from common.caching import PlanBasis
from common.config_models import MemoryConfig
from tests.containers import answered, loaded
from tests.scripted import load_settings

MIB = 1024**2
UNSET = CheckpointIntervals()


def basis(
    *, chunk_size: int = 2048, max_seq_len: int = 32768, interval: int = 2048, size: int = 148 * MIB, budget: int = 4096
) -> PlanBasis:
    return PlanBasis(
        chunk_size=chunk_size,
        max_seq_len=max_seq_len,
        cache_size=max_seq_len,
        interval=interval,
        interval_pp=32768,
        checkpoint_bytes=size,
        budget_bytes=budget * MIB,
    )


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "chosen"),  # chunk_size, interval_pp, interval
    [
        (256, (256, 256, 256)),
        (510, (256, 256, 256)),
        (511, (512, 512, 512)),
        (1024, (1024, 1024, 1024)),
        (2047, (2048, 2048, 2048)),
        (2048, (2048, 2048, 2048)),
        (4095, (2048, 4096, 2048)),
        (5000, (2048, 4096, 2048)),
        (10**6, (2048, 32768, 2048)),  # one checkpoint at the end is enough
    ],
)
def test_with_room_the_target_decides(target: int, chosen: tuple[int, int, int]) -> None:
    choice = choose(target, basis(budget=10**6), UNSET)
    assert choice.met
    assert (choice.basis.chunk_size, choice.basis.interval_pp, choice.basis.interval) == chosen
    assert choice.intervals == CheckpointIntervals(choice.basis.interval, choice.basis.interval_pp)


def test_a_smaller_chunk_is_taken_where_only_that_meets_target_and_budget() -> None:
    given = basis(size=MIB, budget=10)  # ten checkpoints for 32,512 tokens: 3,328 apart at least
    assert choose(4095, given, UNSET).basis.chunk_size == 2048
    choice = choose(3600, given, UNSET)
    assert choice.met
    assert (choice.basis.chunk_size, choice.basis.interval_pp) == (1792, 3584)


def test_without_room_the_densest_checkpoints_that_fit_are_taken_and_the_memory_is_named() -> None:
    choice = choose(512, basis(), UNSET)
    assert not choice.met
    assert (choice.basis.chunk_size, choice.basis.interval_pp, choice.basis.interval) == (1280, 1280, 1280)
    assert choice.reason == (
        "recurrent_checkpoint_target is 512: checkpoints every 1,280 tokens, with chunk_size 1,280 instead of 2,048. "
        "A prompt of 32,768 tokens has 26 of them (3.76 GiB); an edit has at most 1,279 unchanged tokens processed "
        "again. "
        "memory.sysmem_recurrent_cache (4096 MB) has no room for more; the target needs 9472 MB."
    )
    assert choose(512, basis(budget=9472), UNSET).met
    assert not choose(512, basis(budget=9471), UNSET).met


def test_what_was_chosen_is_said() -> None:
    assert choose(5000, basis(), UNSET).reason == (
        "recurrent_checkpoint_target is 5000: checkpoints every 4,096 tokens of a prompt, every 2,048 at its end and "
        "in answers, with chunk_size 2,048. A prompt of 32,768 tokens has 9 of them (1.3 GiB); an edit has at most "
        "4,095 unchanged tokens processed again."
    )


def test_a_budget_without_room_for_one_leaves_everything_as_it_is() -> None:
    given = basis(budget=100)
    choice = choose(512, given, CheckpointIntervals(interval=1024))
    assert (choice.basis, choice.met) == (given, False)
    assert "no checkpoint fits" in choice.reason


def test_seconds_count_at_the_measured_speed() -> None:
    choice = choose("3.5s", basis(), UNSET, tokens_per_second=600.2)
    assert choice.basis == choose(2100, basis(), UNSET).basis
    assert choice.reason.startswith(
        "recurrent_checkpoint_target is 3.5s, 2,100 tokens at the measured 600 tokens/s: checkpoints every 2,048"
    )
    # Nothing is denser than a page.
    assert choose("0.001s", basis(budget=10**6), UNSET, tokens_per_second=100).basis.interval_pp == 256


@pytest.mark.parametrize(
    ("explicit", "in_force"),
    [(CheckpointIntervals(interval=256), (256, 1024)), (CheckpointIntervals(interval_pp=8192), (1024, 8192))],
)
def test_an_interval_that_is_set_stays(explicit: CheckpointIntervals, in_force: tuple[int, int]) -> None:
    got = choose(1024, basis(budget=10**4), explicit).basis
    assert (got.interval, got.interval_pp) == in_force
    assert got.chunk_size == 1024


pages = st.integers(1, 64)


@given(
    target=st.one_of(st.integers(256, 9000), st.integers(256, 300000)),
    max_seq_len=st.one_of(st.integers(1, 20000), st.integers(1, 200000)),
    chunk_size=pages.map(lambda count: count * 256),
    interval=st.sampled_from([256, 2048, 6144]),
    capacity=st.one_of(st.integers(1, 20), st.integers(1, 1000)),
    prompts=st.lists(st.floats(0, 1), max_size=5),
)
def test_the_target_is_kept_whenever_the_budget_allows_it(
    target: int, max_seq_len: int, chunk_size: int, interval: int, capacity: int, prompts: list[float]
) -> None:
    given = basis(chunk_size=chunk_size, max_seq_len=max_seq_len, interval=interval, size=MIB, budget=capacity)
    choice = choose(target, given, UNSET)
    got = choice.basis
    assert got.chunk_size % 256 == got.interval % 256 == got.interval_pp % 256 == 0
    assert 256 <= got.chunk_size <= chunk_size
    assert got.interval >= min(interval, got.interval_pp)
    worst = target if choice.met else max(got.interval_pp - 1, 255)
    for share in (*prompts, 1):
        longest = plan_for(got, max(1, round(share * max_seq_len)))
        assert longest.worst_overhead <= worst
    # Any densities with which the target is kept have at least so many checkpoints as pages of the target fit.
    last = (max_seq_len - 1) // 256 * 256
    allowed = -(-last // ((target + 1) // 256 * 256)) <= capacity
    assert choice.met == allowed
    if not choice.met:
        # One chunk nearer, and they would not fit.
        nearer = got.interval_pp - got.chunk_size if got.interval_pp > got.chunk_size else got.chunk_size - 256
        assert nearer == 0 or -(-last // nearer) > capacity


# --- the container --------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


async def processed(container: ExllamaV3Container, prompt: list[int]) -> int:
    usage = (await answered(container, prompt, max_tokens=1)).finish.usage
    return usage.prompt_tokens - usage.cached_tokens - 1


async def test_an_edit_of_a_served_prompt_costs_no_more_than_the_target(tiny_hybrid: Path, log: list[str]) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(5, 1000) for _ in range(2500)]
    async with loaded(tiny_hybrid, recurrent_checkpoint_target=700, max_seq_len=4096) as container:
        assert any(line.startswith("recurrent_checkpoint_target is 700: checkpoints every 512 tokens") for line in log)
        info = container.info()
        assert info.chunk_size == 512
        assert info.checkpoints is not None
        assert (info.checkpoints.interval, info.checkpoints.interval_pp) == (512, 512)
        assert info.warnings == []
        await processed(container, prompt)
        for position in (500, 1023, 2499):
            edited = [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]
            assert await processed(container, edited) - (len(prompt) - 1 - position) <= 700


async def test_seconds_are_measured_before_the_generator_that_serves(
    tiny_hybrid: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, int]] = []

    async def measure(generator: AsyncGenerator, *, tokens: int, vocabulary: int) -> float:
        speed = await measure_prefill_speed(generator, tokens=tokens, vocabulary=vocabulary)
        assert speed > 0
        measured.append((tokens, vocabulary))
        return 350.0

    monkeypatch.setattr("backends.exllamav3.model.measure_prefill_speed", measure)
    async with loaded(tiny_hybrid, recurrent_checkpoint_target="1.5s", chunk_size=1024) as container:
        assert measured == [(1024, container.tokenizer.actual_vocab_size)]
        (line,) = [line for line in log if line.startswith("recurrent_checkpoint_target is 1.5s, 525 tokens at the")]
        assert "checkpoints every 512 tokens, with chunk_size 512 instead of 1,024" in line
        assert container.info().chunk_size == 512
        basis = container.plan_basis()
        assert basis is not None
        assert (basis.chunk_size, basis.interval, basis.interval_pp) == (512, 512, 512)
        prompt = [7 + i % 900 for i in range(1500)]
        assert await processed(container, prompt) == 1499
        assert await processed(container, prompt) == 1499 - 1280


async def test_nothing_is_measured_where_both_intervals_are_set(
    tiny_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*arguments: object, **named: object) -> float:
        raise AssertionError("not to be called")

    monkeypatch.setattr("backends.exllamav3.model.measure_prefill_speed", measure)
    intervals: dict[str, Any] = {"recurrent_checkpoint_interval": 512, "recurrent_checkpoint_interval_pp": 512}
    async with loaded(tiny_hybrid, recurrent_checkpoint_target="1s", **intervals) as container:
        (warning,) = [text for text in container.info().warnings if "recurrent_checkpoint_target" in text]
        assert "has no effect" in warning
        assert container.info().chunk_size == 2048


async def test_a_target_on_a_model_without_recurrent_layers_has_no_effect(tiny_llama: Path) -> None:
    container = ExllamaV3Container.create(tiny_llama, load_settings(max_seq_len=1024, recurrent_checkpoint_target="3s"))
    assert container.warnings == ["recurrent_checkpoint_target has no effect: this model has no recurrent layers."]
    assert container.plan_basis() is None


async def test_a_target_that_the_budget_does_not_allow_is_a_warning(tiny_hybrid: Path) -> None:
    settings = load_settings(max_seq_len=32768, recurrent_checkpoint_target=256, recurrent_checkpoint_boundaries=0)
    settings = settings.model_copy(update={"memory": MemoryConfig(sysmem_recurrent_cache=1)})
    container = ExllamaV3Container.create(tiny_hybrid, settings)
    (warning,) = container.warnings
    assert warning.startswith("recurrent_checkpoint_target is 256: checkpoints every ")
    assert "memory.sysmem_recurrent_cache (1 MB) has no room for more; the target needs " in warning
