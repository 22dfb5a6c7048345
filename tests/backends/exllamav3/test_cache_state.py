"""What the caches of a live generator hold, and how they are emptied and written to disk; on the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.exllamav3.checkpoints import checkpoint_info
from backends.exllamav3.engine import Generator
from backends.exllamav3.model import ExllamaV3Container
from common.caching import CacheChange, CacheState, TierState
from common.config_models import MemoryConfig
from common.errors import EngineFailed, Unsupported
from common.generation import GenerationRequest, Prefill, TextDelta
from tests.containers import GREEDY, Answer, answered, loaded

pytestmark = pytest.mark.anyio

HYBRID: dict[str, Any] = {"cache_size": 4096, "max_seq_len": 4096, "chunk_size": 256}
EVERY_PAGE: dict[str, Any] = {"recurrent_checkpoint_interval": 256, "recurrent_checkpoint_interval_pp": 256}


@pytest.fixture(scope="module")
async def hybrid(tiny_hybrid: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_hybrid, recurrent_checkpoint_interval=256, **HYBRID) as container:
        yield container


def files(folder: Path, suffix: str) -> list[Path]:
    return list(folder.rglob(f"*.{suffix}"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(f"{length} {seed}").choices(range(5, 1000), k=length)


def engine_of(container: ExllamaV3Container) -> Generator:
    assert container.generator is not None
    return container.generator.generator


def tiers(state: CacheState) -> dict[str, TierState]:
    return {tier.tier: tier for tier in state.tiers}


async def cached_tokens(container: ExllamaV3Container, prompt: list[int]) -> int:
    return (await answered(container, prompt, max_tokens=1)).finish.usage.cached_tokens


# --- what they hold ---------------------------------------------------------------------------------------------------


async def test_pages_and_checkpoints_of_served_prompts(tiny_hybrid: Path) -> None:
    async with loaded(tiny_hybrid, **HYBRID) as container:
        state = container.cache_state()
        (vram,) = state.tiers
        page_bytes = sum(tensor[0].nbytes for tensor in container.cache.get_all_tensors())
        assert vram == TierState(
            tier="vram",
            capacity_tokens=4096,
            capacity_bytes=16 * page_bytes,
            used_tokens=0,
            used_bytes=0,
            active_tokens=0,
            hit_tokens=0,
            evicted_tokens=0,
        )
        assert state.checkpoints is not None
        assert state.checkpoints.entries == []
        assert (state.active_requests, state.queued_requests) == (0, 0)

        await answered(container, prompt_of(1100), max_tokens=1, cache_boundaries=[300])
        await answered(container, prompt_of(1100), max_tokens=1)
        state = container.cache_state()
        (vram,) = state.tiers
        assert (vram.used_tokens, vram.used_bytes, vram.hit_tokens) == (1024, 4 * page_bytes, 1024)
        held = state.checkpoints
        assert held is not None
        assert [(entry.position, entry.boundary, entry.usable) for entry in held.entries] == [
            (256, True, True),
            (1024, False, True),
        ]
        assert all(entry.tier == "ram" and entry.age_seconds is not None for entry in held.entries)
        assert all(0 <= entry.age_seconds < 60 for entry in held.entries if entry.age_seconds is not None)
        info = checkpoint_info(engine_of(container))
        assert info is not None
        assert {entry.bytes for entry in held.entries} == {held.checkpoint_bytes} == {info.bytes}
        assert held.used_bytes == 2 * info.bytes
        assert held.capacity == held.capacity_bytes // info.bytes
        assert (held.hits, held.replayed_tokens) == (1, 0)


async def test_what_was_dropped_and_what_can_be_used_no_longer(tiny_hybrid: Path) -> None:
    async with loaded(tiny_hybrid, **HYBRID, **EVERY_PAGE) as container:
        info = checkpoint_info(engine_of(container))
        assert info is not None
        await answered(container, prompt_of(2100), max_tokens=1)
        job = container.start(GenerationRequest(prompt=prompt_of(3000), sampling=GREEDY, max_tokens=1))
        async for event in job.events():
            if isinstance(event, Prefill):
                break
        state = container.cache_state()
        assert (state.active_requests, state.queued_requests) == (1, 0)
        vram = tiers(state)["vram"]
        assert vram.active_tokens == 12 * 256  # of the prompt, and of the answer
        assert vram.evicted_tokens == 4 * 256
        assert state.checkpoints is not None
        usable = [(entry.position, entry.usable) for entry in state.checkpoints.entries]
        lost = [(position, False) for position in range(1280, 2049, 256)]
        assert usable[:4] == lost, "what no prompt can use is the next to be dropped"
        assert [position for position, can in usable if can] == [256, 512, 768, 1024, 256]
        await job.cancel()
        state = container.cache_state()
        assert state.checkpoints is not None
        assert state.checkpoints.pruned == 3  # the pages reserved for the answer are again what they were
        engine_of(container).recurrent_cache.max_size = 5 * info.bytes
        await answered(container, prompt_of(700), max_tokens=1)
        state = container.cache_state()
        assert state.checkpoints is not None
        assert state.checkpoints.capacity == 5
        assert state.checkpoints.evictions == state.checkpoints.evictions_usable > 0
        assert len(state.checkpoints.entries) == 5


async def test_tokens_that_are_replayed_are_counted(hybrid: ExllamaV3Container) -> None:
    await hybrid.clear()
    before = hybrid.cache_state().checkpoints
    await answered(hybrid, prompt_of(1500), max_tokens=1)
    await answered(hybrid, prompt_of(1500)[:600], max_tokens=1)  # 512 are cached, without a checkpoint
    after = hybrid.cache_state().checkpoints
    assert before is not None
    assert after is not None
    assert (after.hits - before.hits, after.replayed_tokens - before.replayed_tokens) == (0, 512)


async def test_a_model_without_recurrent_layers(llama: ExllamaV3Container) -> None:
    await llama.clear()
    await answered(llama, prompt_of(600), max_tokens=1)
    state = llama.cache_state()
    assert state.checkpoints is None
    assert tiers(state)["vram"].used_tokens == 512


async def test_pages_in_host_ram_and_on_disk(tiny_hybrid: Path, tmp_path: Path) -> None:
    memory = MemoryConfig(sysmem_kv_cache=4, disk_cache_dir=str(tmp_path), disk_cache_checkpoint_interval=0)
    small = HYBRID | {"cache_size": 2048, "max_seq_len": 2048}
    async with loaded(tiny_hybrid, memory=memory, **small, **EVERY_PAGE) as container:
        await answered(container, prompt_of(1500), max_tokens=1)
        await answered(container, prompt_of(1500, seed=1), max_tokens=1)
        await container.flush()
        state = container.cache_state()
        vram, ram, disk = state.tiers
        assert (vram.tier, ram.tier, disk.tier) == ("vram", "ram", "disk")
        assert ram.used_bytes == ram.used_tokens // 256 * (ram.capacity_bytes // (ram.capacity_tokens // 256))
        assert disk.used_tokens == 10 * 256
        assert disk.used_bytes > 10 * vram.capacity_bytes // 8
        assert disk.capacity_bytes == memory.disk_cache_size * 1024**2
        assert (ram.active_tokens, disk.active_tokens, disk.hit_tokens) == (0, 0, 0)
        again = await answered(container, prompt_of(1500), max_tokens=1)
        assert again.finish.usage.ram_tokens > 0
        assert tiers(container.cache_state())["ram"].hit_tokens == again.finish.usage.ram_tokens

    async with loaded(tiny_hybrid, memory=memory, **small, **EVERY_PAGE) as container:
        state = container.cache_state()
        assert tiers(state)["disk"].used_tokens == 10 * 256
        assert state.checkpoints is not None
        assert len(state.checkpoints.entries) == 10
        assert {(entry.tier, entry.age_seconds, entry.usable) for entry in state.checkpoints.entries} == {
            ("disk", None, True)
        }
        assert await cached_tokens(container, prompt_of(1500)) == 1280
        assert tiers(container.cache_state())["disk"].hit_tokens == 1280


# --- clear ------------------------------------------------------------------------------------------------------------


async def test_after_clear_a_prompt_is_processed_in_full(hybrid: ExllamaV3Container) -> None:
    await hybrid.clear()
    await answered(hybrid, prompt_of(1100), max_tokens=1, cache_boundaries=[600])
    assert await hybrid.clear() == CacheChange(pages=4, checkpoints=3)
    state = hybrid.cache_state()
    assert tiers(state)["vram"].used_tokens == 0
    assert state.checkpoints is not None
    assert state.checkpoints.entries == []
    request = GenerationRequest(prompt=prompt_of(1100), sampling=GREEDY)
    assert hybrid.explain(request).reason == "No earlier prompt that is still known begins like this one."
    assert await cached_tokens(hybrid, prompt_of(1100)) == 0
    assert await hybrid.clear() == CacheChange(pages=4, checkpoints=2)
    assert await hybrid.clear() == CacheChange(pages=0, checkpoints=0)


async def test_clear_without_recurrent_layers(llama: ExllamaV3Container) -> None:
    await llama.clear()
    await answered(llama, prompt_of(600), max_tokens=1)
    assert await llama.clear() == CacheChange(pages=2, checkpoints=0)
    assert await cached_tokens(llama, prompt_of(600)) == 0


async def test_clear_does_not_bring_back_pages_that_an_answer_had_reserved(hybrid: ExllamaV3Container) -> None:
    await hybrid.clear()
    await answered(hybrid, prompt_of(3900), max_tokens=1)
    job = hybrid.start(GenerationRequest(prompt=prompt_of(100), sampling=GREEDY, max_tokens=2000))
    async for event in job.events():
        if isinstance(event, TextDelta):
            break
    await hybrid.clear()
    await job.cancel()
    assert tiers(hybrid.cache_state())["vram"].used_tokens == 0


async def test_running_requests_go_on_unharmed(hybrid: ExllamaV3Container) -> None:
    async def answers(clears: int) -> list[list[int]]:
        await hybrid.clear()
        await answered(hybrid, prompt_of(511), max_tokens=1)
        started = asyncio.Event()

        async def long_answer() -> Answer:
            answer = Answer()
            # Its answer is generated in two segments, between which it holds no pages.
            job = hybrid.start(GenerationRequest(prompt=prompt_of(511), sampling=GREEDY, max_tokens=280))
            async for event in job.events():
                if isinstance(event, TextDelta):
                    answer.deltas.append(event)
                    if len(answer.deltas) == 20:
                        started.set()
            await job.cancel()
            return answer

        answering = asyncio.create_task(long_answer())
        await started.wait()
        prefilling = asyncio.create_task(answered(hybrid, prompt_of(1100), max_tokens=4))
        for _ in range(clears):
            await hybrid.clear()
            await asyncio.sleep(0)
        while not answering.done():
            if clears:
                await hybrid.clear()
            await asyncio.sleep(0.02)
        return [(await answering).token_ids, (await prefilling).token_ids]

    undisturbed = await answers(0)
    assert [len(token_ids) for token_ids in undisturbed] == [280, 4]
    assert await answers(5) == undisturbed


async def test_clear_empties_every_tier(tiny_hybrid: Path, tmp_path: Path) -> None:
    memory = MemoryConfig(sysmem_kv_cache=4, disk_cache_dir=str(tmp_path), disk_cache_checkpoint_interval=0)
    small = HYBRID | {"cache_size": 2048, "max_seq_len": 2048}
    async with loaded(tiny_hybrid, memory=memory, **small, **EVERY_PAGE) as container:
        await answered(container, prompt_of(1500), max_tokens=1)
        await answered(container, prompt_of(1500, seed=1), max_tokens=1)
        await container.flush()
        assert await container.clear() == CacheChange(pages=10, checkpoints=10)
        state = container.cache_state()
        assert [tier.used_tokens for tier in state.tiers] == [0, 0, 0]
        assert state.checkpoints is not None
        assert state.checkpoints.entries == []
        assert files(tmp_path, "kv") + files(tmp_path, "rs") == []
        assert await cached_tokens(container, prompt_of(1500)) == 0
        # Not flushed: what is being written when the cache is cleared is gone as well.
        await container.clear()
        assert files(tmp_path, "kv") + files(tmp_path, "rs") == []


# --- flush ------------------------------------------------------------------------------------------------------------


async def test_flush_needs_a_tier_on_disk(hybrid: ExllamaV3Container) -> None:
    with pytest.raises(Unsupported, match=r"memory\.disk_cache_dir"):
        await hybrid.flush()


async def test_flush_writes_while_requests_go_on(tiny_hybrid: Path, tmp_path: Path) -> None:
    memory = MemoryConfig(
        sysmem_kv_cache=1,
        disk_cache_dir=str(tmp_path),
        disk_cache_checkpoint_interval=0,
        disk_cache_flush_on_idle=False,
    )
    async with loaded(tiny_hybrid, memory=memory, **HYBRID, **EVERY_PAGE) as container:
        for seed in range(2):
            await answered(container, prompt_of(1100, seed), max_tokens=1)
        assert files(tmp_path, "kv") == []
        expected = await answered(container, prompt_of(300), max_tokens=30)
        running = asyncio.create_task(answered(container, prompt_of(300), max_tokens=30))
        await asyncio.sleep(0)
        change = await container.flush()
        assert change.pages == len(files(tmp_path, "kv")) >= 9
        assert change.checkpoints == len(files(tmp_path, "rs")) >= 9
        assert (await running).token_ids == expected.token_ids
        assert (await container.flush()).checkpoints <= 1

    async with loaded(tiny_hybrid, memory=memory, **HYBRID, **EVERY_PAGE) as container:
        assert await cached_tokens(container, prompt_of(1100)) == 1024
        engine_of(container).disk_page_cache.write_disabled = True
        with pytest.raises(EngineFailed, match=r"memory\.disk_cache_dir"):
            await container.flush()
