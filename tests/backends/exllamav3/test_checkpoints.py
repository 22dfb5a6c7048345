"""Checkpoint arithmetic, alone and beside the real engine."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from backends.exllamav3.checkpoints import (
    DEFAULT_BOUNDARIES,
    DEFAULT_INTERVAL,
    DEFAULT_INTERVAL_PP,
    CheckpointIntervals,
    CheckpointPlan,
    advise,
    boundary_pages,
    checkpoint_bytes,
    checkpoint_info,
    describe_price,
    plan,
    plan_for,
    readable_bytes,
)
from backends.exllamav3.engine import AsyncGenerator, token_tensor
from backends.exllamav3.jobs import AsyncCheckpointJob, CheckpointLedger, Placement
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.turns import Turns
from common.caching import PlanBasis
from common.config_models import DraftModelConfig
from common.errors import InvalidRequest
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


def basis(**fields: int) -> PlanBasis:
    defaults = PlanBasis(
        chunk_size=1024,
        max_seq_len=65536,
        cache_size=65536,
        interval=DEFAULT_INTERVAL,
        interval_pp=DEFAULT_INTERVAL_PP,
        checkpoint_bytes=MIB,
        budget_bytes=4096 * MIB,
    )
    return msgspec.structs.replace(defaults, **fields)


def advice(
    interval: int | None = None,
    interval_pp: int | None = None,
    *,
    recurrent: bool = True,
    default_interval: int = DEFAULT_INTERVAL,
    target: int | str | None = None,
    boundaries: int = DEFAULT_BOUNDARIES,
    **of_basis: int,
) -> list[str]:
    return advise(
        CheckpointIntervals(interval, interval_pp),
        basis=basis(**of_basis) if recurrent else None,
        default_interval=default_interval,
        target=target,
        boundaries=boundaries,
    )


def test_nothing_set_needs_no_advice() -> None:
    assert advice() == []
    assert advice(recurrent=False) == []
    assert advice(target=2048) == []
    assert advice(boundaries=0) == []
    assert advice(boundaries=5) == []
    assert advice(recurrent=False, boundaries=0) == []


@pytest.mark.parametrize(
    ("interval", "interval_pp", "chunk_size"),
    [(1024, 1024, 1024), (2048, 2048, 1024), (None, 2048, 1024), (1024, None, 512)],
)
def test_settings_that_do_what_they_say_need_no_advice(
    interval: int | None, interval_pp: int | None, chunk_size: int
) -> None:
    assert advice(interval, interval_pp, chunk_size=chunk_size) == []


def test_a_model_without_recurrent_layers_is_named_as_the_only_reason() -> None:
    (sentence,) = advice(interval=256, interval_pp=512, recurrent=False)
    assert "recurrent_checkpoint_interval and recurrent_checkpoint_interval_pp have no effect" in sentence
    (sentence,) = advice(interval_pp=512, recurrent=False)
    assert sentence.startswith("recurrent_checkpoint_interval_pp has no effect")
    (sentence,) = advice(interval=256, target="3s", boundaries=5, recurrent=False)
    assert sentence == (
        "recurrent_checkpoint_interval, recurrent_checkpoint_target and recurrent_checkpoint_boundaries have no "
        "effect: this model has no recurrent layers."
    )


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
    intervals: dict[str, Any] = {key: 4096}
    (sentence,) = advice(**intervals, cache_size=4096, default_interval=256)
    assert f"recurrent_checkpoint_{key} is 4096, and the cache holds 4096 tokens" in sentence


def test_intervals_that_are_set_leave_a_target_less_to_say() -> None:
    (sentence,) = advice(interval=1024, interval_pp=1024, target=2048)
    assert sentence.startswith("recurrent_checkpoint_target has no effect: both intervals are set")
    (sentence,) = advice(interval_pp=1024, target="3s")
    assert sentence.startswith("recurrent_checkpoint_interval_pp is set, so recurrent_checkpoint_target says only")
    (sentence,) = advice(interval=1024, target=2048)
    assert sentence.startswith("recurrent_checkpoint_interval is set, so")


def test_a_budget_without_room_for_one_checkpoint_names_one_that_has_it() -> None:
    (sentence,) = advice(checkpoint_bytes=148 * MIB + 1, budget_bytes=100 * MIB)
    assert "memory.sysmem_recurrent_cache is 100, but one checkpoint takes 148 MiB: none is kept" in sentence
    assert "Set it to 149 at least, better to 593" in sentence
    assert plan(1000, 512, 512, 512, checkpoint_bytes=148 * MIB + 1, budget_bytes=149 * MIB).capacity == 1
    (sentence,) = advice(checkpoint_bytes=60_000, budget_bytes=0)
    assert sentence.endswith("Set it to 1 at least.")


@pytest.mark.parametrize(("boundaries", "fit", "advised"), [(2, 3, True), (2, 4, False), (5, 6, True), (0, 1, False)])
def test_a_budget_too_small_for_the_boundaries_names_one_that_is_not(boundaries: int, fit: int, advised: bool) -> None:
    sentences = advice(boundaries=boundaries, checkpoint_bytes=10 * MIB, budget_bytes=fit * 10 * MIB)
    assert bool(sentences) == advised
    if advised:
        (sentence,) = sentences
        assert f"recurrent_checkpoint_boundaries is {boundaries}, for {boundaries + 2} checkpoints" in sentence
        assert f"holds {fit}" in sentence
        assert f"Set it to {(boundaries + 2) * 10} at least" in sentence


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (18944, "18.5 KiB"),
        (148 * MIB, "148 MiB"),
        (1010 * MIB, "1010 MiB"),
        (4096 * MIB, "4 GiB"),
        (2000 * 1024**4, "2000 TiB"),
    ],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text


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


CHAT_BOUNDARIES = (700, 4100, 4700)  # the system prompt ends, two user turns begin


def with_boundaries(prompt_tokens: int, boundaries: Sequence[int], capacity: int = 10**6) -> CheckpointPlan:
    return plan(prompt_tokens, 1024, 2048, 32768, checkpoint_bytes=1, budget_bytes=capacity, boundaries=boundaries)


def test_boundaries_get_the_end_of_the_page_before_them_and_stand_in_for_the_marks_before_the_last() -> None:
    computed = with_boundaries(5000, CHAT_BOUNDARIES)
    assert computed.anchors == (512, 4096, 4608)
    assert computed.marks == (512, 4096, 4608, 4864)
    assert [computed.replay(edit) - computed.floor(edit) for edit in CHAT_BOUNDARIES] == [0, 0, 0]


def test_boundaries_cost_at_most_a_pass_each() -> None:
    plain = with_boundaries(5000, ())
    assert plain.passes == 6  # 4 chunks, the rest of the last full page, what follows it
    assert with_boundaries(5000, CHAT_BOUNDARIES).passes == 8  # 512, 1536, 2560, 3584, 4096, 4608, 4864, 4999
    assert with_boundaries(5000, (1024, 2100)).passes == plain.passes  # where chunks end anyway


def test_past_the_last_boundary_marks_are_as_without() -> None:
    assert with_boundaries(9000, (512,)).marks == (512, 7680, 8960)
    assert with_boundaries(9000, ()).marks == (7168, 8960)
    assert with_boundaries(70000, (512, 65000)).marks == (512, 33280, 64768, 68864, 69888)


def test_boundaries_without_a_page_before_them_count_as_none() -> None:
    assert with_boundaries(5000, (0, 100, 255)) == with_boundaries(5000, ())
    assert with_boundaries(5000, (5000, 4999, 4864)).anchors == (4864,)
    assert with_boundaries(200, (100,)).anchors == ()


def test_anchors_outlive_other_marks_the_lowest_the_longest() -> None:
    marks = with_boundaries(5000, CHAT_BOUNDARIES).marks
    assert with_boundaries(5000, CHAT_BOUNDARIES, 3).kept == (512, 4608, 4864)
    assert with_boundaries(5000, CHAT_BOUNDARIES, 2).kept == (512, 4864)
    assert with_boundaries(5000, CHAT_BOUNDARIES, 1).kept == (4864,)
    assert with_boundaries(5000, CHAT_BOUNDARIES, 0).kept == ()
    assert with_boundaries(5000, CHAT_BOUNDARIES, 4).kept == marks


pages = st.integers(1, 40).map(lambda count: count * 256)


@given(
    st.integers(1, 20000),
    st.integers(256, 8192),
    pages,
    pages,
    st.integers(0, 20),
    st.lists(st.integers(0, 20000), max_size=4),
)
def test_plan_holds_together(
    prompt_tokens: int, chunk_size: int, interval: int, interval_pp: int, capacity: int, boundaries: list[int]
) -> None:
    computed = plan(
        prompt_tokens,
        chunk_size,
        interval,
        interval_pp,
        checkpoint_bytes=1,
        budget_bytes=capacity,
        boundaries=boundaries,
    )
    assert list(computed.marks) == sorted(set(computed.marks))
    assert all(mark % 256 == 0 and 0 < mark < prompt_tokens for mark in computed.marks)
    assert set(computed.anchors) <= set(computed.marks)
    assert len(computed.kept) == min(capacity, len(computed.marks))
    assert computed.kept == tuple(sorted(computed.kept))
    assert set(computed.marks[-1:]) <= set(computed.kept) or capacity == 0
    overheads = [position - computed.resume(position) for position in range(prompt_tokens)]
    assert max(overheads) == computed.worst_overhead
    for position in (*boundaries, 0, prompt_tokens // 2, prompt_tokens):
        assert 0 <= computed.floor(position) <= computed.replay(position) <= max(prompt_tokens - 1, 0)
        if min(position, prompt_tokens - 1) // 256 * 256 in {0, *computed.kept}:
            assert computed.replay(position) == computed.floor(position)
    plain = plan(prompt_tokens, chunk_size, interval, interval_pp, checkpoint_bytes=1, budget_bytes=capacity)
    assert plain.passes <= computed.passes <= plain.passes + len(computed.anchors)


# --- the plan for a request -----------------------------------------------------------------------------------------


def test_what_is_not_asked_for_is_as_in_the_basis() -> None:
    given = basis(interval=512, interval_pp=1024, checkpoint_bytes=3, budget_bytes=100)
    assert plan_for(given, PROMPT_TOKENS) == plan(PROMPT_TOKENS, 1024, 512, 1024, checkpoint_bytes=3, budget_bytes=100)
    assert plan_for(
        given, PROMPT_TOKENS, chunk_size=700, interval=256, interval_pp=768, boundaries=[5000, 300], budget_mb=2
    ) == plan(PROMPT_TOKENS, 768, 256, 768, checkpoint_bytes=3, budget_bytes=2 * MIB, boundaries=[300, 5000])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 65537}, "prompt_tokens"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"interval": 1000}, "recurrent_checkpoint_interval"),
        ({"interval": 0}, "recurrent_checkpoint_interval"),
        ({"interval_pp": -256}, "recurrent_checkpoint_interval_pp"),
        ({"boundaries": [5, -1]}, "boundaries.1"),
        ({"boundaries": [1001]}, "boundaries.0"),
        ({"budget_mb": -1}, "sysmem_recurrent_cache"),
    ],
)
def test_bad_values_are_named(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param.removesuffix(".0").removesuffix(".1").removesuffix("ies")) as raised:
        plan_for(basis(), **({"prompt_tokens": 1000} | asked))
    assert raised.value.param == param


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


@dataclass(frozen=True)
class Prefilled:
    tokens: int  # that went through prefill
    passes: int


async def prefilled(container: ExllamaV3Container, prompt: list[int], boundaries: Iterable[int] = ()) -> Prefilled:
    """Serve the prompt for one token."""
    assert container.generator is not None
    job = AsyncCheckpointJob(
        container.generator,
        Placement(CheckpointLedger(), boundary_pages(boundaries, len(prompt))),
        Turns(),
        "",
        container.on_results,
        input_ids=token_tensor(prompt),
        max_new_tokens=1,
    )
    passes, last = 0, {}
    async for last in job:
        passes += last["stage"] == "prefill"
    return Prefilled(last["prompt_tokens"] - last["cached_tokens"] - 1, passes)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 1000) for _ in range(length)]


def edited(prompt: list[int], position: int) -> list[int]:
    return [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    chunk_size: int
    interval_pp: int
    interval: int
    capacity: int = 1000
    boundaries: tuple[int, ...] = ()


def cases() -> Iterator[Case]:
    for prompt_tokens in (1, 2, 256, 257, 258, 512, 513, 769, 2048, 2049):
        yield Case(prompt_tokens, 512, 512, 512)
    yield Case(2049, 2048, 2048, 2048)
    yield Case(2000, 1000, 1024, 1024)  # chunks of 768
    yield Case(1537, 512, 32768, 2048, capacity=0)
    yield Case(2500, 512, 32768, 256, boundaries=(300, 1200, 1300))
    yield Case(2500, 512, 32768, 256, boundaries=(300, 1200, 2490))  # the last one on the last page
    yield Case(2500, 512, 512, 256, boundaries=(255, 600, 600, 1100))
    yield Case(2500, 512, 256, 256, capacity=3, boundaries=(300, 1200))
    yield Case(2500, 512, 256, 256, capacity=1, boundaries=(300, 1200))
    yield from random_cases(4, seed=11)


def random_cases(count: int, *, seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for number in range(count):
        prompt_tokens = rng.randint(1, 2500)
        boundaries = [rng.randrange(prompt_tokens) for _ in range(rng.randint(1, 4))] if number % 3 else []
        yield Case(
            prompt_tokens,
            rng.choice((256, 512, 768, 1000, 1024, 1500, 2048)),
            256 * rng.randint(1, 12),
            256 * rng.randint(1, 10),
            rng.choice((1000, 1000, 4, 3, 2, 1)),
            tuple(boundaries),
        )


@pytest.mark.anyio
@pytest.mark.parametrize(
    "case",
    [*cases(), *(pytest.param(case, marks=pytest.mark.slow) for case in random_cases(60, seed=12))],
    ids=lambda case: "-".join(map(str, astuple(case))),
)
async def test_plan_equals_what_the_engine_does(container: ExllamaV3Container, case: Case) -> None:
    rng = random.Random(case.prompt_tokens)
    prompt = random_prompt(rng, case.prompt_tokens)
    one = checkpoint_bytes([container.cache])
    budget = case.capacity * one + one - 1
    computed = plan(
        case.prompt_tokens,
        case.chunk_size,
        case.interval,
        case.interval_pp,
        checkpoint_bytes=one,
        budget_bytes=budget,
        boundaries=case.boundaries,
    )
    async with generating(
        container,
        max_chunk_size=case.chunk_size,
        recurrent_checkpoint_interval=case.interval,
        recurrent_checkpoint_interval_pp=case.interval_pp,
        recurrent_cache_size=budget,
    ) as generator:
        cold = await prefilled(container, prompt, case.boundaries)
        assert cold == Prefilled(case.prompt_tokens - 1, computed.passes)
        assert generator.recurrent_cache.max_size // one == computed.capacity
        held = generator.recurrent_cache.values()
        assert tuple(sorted(checkpoint["position"] for checkpoint in held)) == computed.kept
        again = await prefilled(container, prompt, case.boundaries)
        assert again.tokens == computed.replay(case.prompt_tokens)
        edit = rng.choice([*case.boundaries, rng.randrange(case.prompt_tokens)])
        after = await prefilled(container, edited(prompt, edit), case.boundaries)
        assert after.tokens == computed.replay(edit)


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
@pytest.mark.parametrize(
    ("model", "drafter", "default_interval"),
    [
        ("tiny_conv", None, 2048),
        ("tiny_sliding", None, 6144),
        ("tiny_hybrid", "tiny_conv", 2048),
        ("tiny_llama", "tiny_sliding", 6144),
    ],
)
async def test_the_basis_of_a_plan_is_known_before_a_weight_is_read(
    request: pytest.FixtureRequest, model: str, drafter: str | None, default_interval: int
) -> None:
    draft = DraftModelConfig()
    if drafter is not None:
        folder: Path = request.getfixturevalue(drafter)
        draft = DraftModelConfig(draft_mode="model", draft_model_name=folder.name, draft_model_dir=str(folder.parent))
    settings = load_settings(max_seq_len=1000, cache_size=2048, chunk_size=512)
    container = ExllamaV3Container.create(
        request.getfixturevalue(model), settings.model_copy(update={"draft_model": draft})
    )
    prepared = container.plan_basis()
    assert prepared is not None
    for _ in container.load():
        pass
    await container.create_generator()
    try:
        assert container.plan_basis() == prepared
        assert container.generator is not None
        generator = container.generator.generator
        await prefilled(container, random_prompt(random.Random(1), 300))
        (held,) = generator.recurrent_cache.values()
        assert prepared == PlanBasis(
            chunk_size=generator.max_chunk_size,
            max_seq_len=1000,
            cache_size=generator.max_total_tokens,
            interval=generator.recurrent_checkpoint_interval,
            interval_pp=generator.recurrent_checkpoint_interval_pp,
            checkpoint_bytes=held["checkpoint_size"],
            budget_bytes=generator.recurrent_cache.max_size,
        )
        assert (prepared.interval, prepared.chunk_size) == (default_interval, 512)
    finally:
        await container.unload()


@pytest.mark.anyio
async def test_there_are_no_checkpoints_without_recurrent_layers(tiny_llama: Path) -> None:
    dense = ExllamaV3Container.create(tiny_llama, load_settings(cache_size=1024, max_seq_len=1024))
    assert dense.plan_basis() is None
    for _ in dense.load():
        pass
    async with generating(dense, max_chunk_size=256) as generator:
        assert checkpoint_info(generator) is None
    dense.model.unload()


# --- the log at load ------------------------------------------------------------------------------------------------


def test_the_price_is_the_worst_that_an_edit_of_the_longest_prompt_costs() -> None:
    given = basis(checkpoint_bytes=148 * MIB, max_seq_len=32768)
    assert describe_price(given) == (
        "A recurrent checkpoint takes 148 MiB of host RAM; memory.sysmem_recurrent_cache (4096 MB) holds 27. In a "
        "prompt of 32,768 tokens an edit can have 30,719 unchanged tokens processed again, on top of what follows it."
    )
    assert plan_for(given, 32768).worst_overhead == 30719
    assert "an edit can have 32,767 unchanged" in describe_price(
        basis(checkpoint_bytes=148 * MIB, max_seq_len=32768, budget_bytes=0)
    )


class StandIn:
    """An AsyncGenerator of which nothing but the intervals in force can be read."""

    def __init__(self, **arguments: object) -> None:
        self.generator = SimpleNamespace(recurrent_checkpoint_interval=512, recurrent_checkpoint_interval_pp=1024)


@pytest.mark.anyio
@pytest.mark.parametrize("model", ["tiny_hybrid", "tiny_llama"])
async def test_intervals_and_price_are_logged_for_models_with_recurrent_layers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("backends.exllamav3.model.AsyncGenerator", StandIn)
    container = ExllamaV3Container.create(request.getfixturevalue(model), load_settings(max_seq_len=1000))
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    await container.create_generator()
    logger.remove(sink)
    expected = [
        "Using recurrent checkpoint intervals: 512 tokens in generated text and at the end of a prompt, 1024 tokens in "
        "the rest of a prompt.",
        describe_price(container.basis) if container.basis is not None else "",
    ]
    assert lines == (expected if model == "tiny_hybrid" else [])


def test_the_module_needs_no_engine() -> None:
    code = (
        "import sys; import backends.exllamav3.checkpoints, backends.exllamav3.plan_report; "
        "sys.exit(', '.join({'torch', 'exllamav3'} & sys.modules.keys()) or None)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
