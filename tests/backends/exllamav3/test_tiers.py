"""Pages of keys and values that come back from host RAM and from disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.checkpoints import MIB
from backends.exllamav3.engine import Generator
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.tiers import DISK_NEEDS_RAM_MB, page_bytes, plan_tiers, write_to_disk
from common.caching import CacheChange
from common.config_models import MemoryConfig
from common.errors import InvalidRequest, ModelLoadFailed
from tests.containers import answered, loaded
from tests.scripted import load_settings

# A cache of four pages, a prompt of three full pages, and one that takes all of the cache.
FOUR_PAGES: dict[str, Any] = {"cache_size": 1024, "max_seq_len": 1024}
PROMPT = [5 + i % 900 for i in range(800)]
FULL_PAGES = 768
FILLER = [7 + i * 7 % 900 for i in range(1000)]

models = pytest.mark.parametrize("name", ["tiny_llama", "tiny_hybrid", "tiny_sliding"])


def on_disk(folder: Path, **memory: Any) -> MemoryConfig:
    """A tier on disk that keeps every checkpoint, and a small one in host RAM before it."""
    return MemoryConfig.model_validate(
        {"sysmem_kv_cache": 16, "disk_cache_dir": str(folder), "disk_cache_checkpoint_interval": 0} | memory
    )


def engine_of(container: ExllamaV3Container) -> Generator:
    assert container.generator is not None
    return container.generator.generator


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.rglob(f"*.{suffix}"))


# --- pages that come back ---------------------------------------------------------------------------------------------


@models
async def test_pages_come_back_from_ram_and_after_another_load_from_disk(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = request.getfixturevalue(name)
    async with loaded(directory, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        cold = await answered(model, PROMPT)
        await answered(model, FILLER)
        warm = await answered(model, PROMPT)
        usage = warm.finish.usage
        assert (usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (FULL_PAGES, FULL_PAGES, 0)
        assert warm.token_ids == cold.token_ids
    async with loaded(directory, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        again = await answered(model, PROMPT)
        usage = again.finish.usage
        assert (usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (FULL_PAGES, 0, FULL_PAGES)
        assert again.token_ids == cold.token_ids


async def test_a_tier_in_ram_alone(tiny_hybrid: Path) -> None:
    async with loaded(tiny_hybrid, memory=MemoryConfig(sysmem_kv_cache=16), **FOUR_PAGES) as model:
        cold = await answered(model, PROMPT)
        await answered(model, FILLER)
        warm = await answered(model, PROMPT)
        assert warm.finish.usage.ram_tokens == FULL_PAGES
        assert warm.token_ids == cold.token_ids


@pytest.mark.slow
async def test_states_in_fp32_take_more_and_survive_disk(tiny_hybrid: Path, tmp_path: Path) -> None:
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), recurrent_dtype="fp32", **FOUR_PAGES) as model:
        full = model.info().checkpoints
        cold = await answered(model, PROMPT)
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), recurrent_dtype="fp32", **FOUR_PAGES) as model:
        warm = await answered(model, PROMPT)
        assert warm.finish.usage.disk_tokens == FULL_PAGES
        assert warm.token_ids == cold.token_ids
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        half = model.info().checkpoints
        assert (await answered(model, PROMPT)).finish.usage.cached_tokens == 0
    assert half is not None
    assert full is not None
    assert half.bytes < full.bytes < 2 * half.bytes  # the convolution's state is as before


async def test_everything_can_be_written_at_once(tiny_hybrid: Path, tmp_path: Path) -> None:
    """More pages than the tier in host RAM has room for, in steps."""
    memory = on_disk(tmp_path, sysmem_kv_cache=1, disk_cache_flush_on_idle=False, disk_cache_write_interval=0)
    async with loaded(tiny_hybrid, memory=memory, cache_size=2048, max_seq_len=2048) as model:
        await answered(model, FILLER + PROMPT)
        engine = engine_of(model)
        assert engine.cpu_page_cache.max_slots == 4
        assert files(tmp_path, "kv") == []
        assert await write_to_disk(engine) == CacheChange(pages=7, checkpoints=1)
        assert (len(files(tmp_path, "kv")), len(files(tmp_path, "rs"))) == (7, 1)
        assert await write_to_disk(engine) == CacheChange(pages=0, checkpoints=0)


async def test_without_the_flush_only_what_left_the_cache_is_kept(tiny_llama: Path, tmp_path: Path) -> None:
    memory = on_disk(tmp_path, disk_cache_flush_on_idle=False, disk_cache_write_interval=0)
    async with loaded(tiny_llama, memory=memory, **FOUR_PAGES) as model:
        await answered(model, PROMPT)
    assert files(tmp_path, "kv") == []


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_small_disk_tier_drops_what_is_oldest(tiny_hybrid: Path, tmp_path: Path) -> None:
    memory = on_disk(tmp_path, disk_cache_size=1)
    async with loaded(tiny_hybrid, memory=memory, **FOUR_PAGES) as model:
        for prompt in (PROMPT, FILLER, PROMPT):
            await answered(model, prompt)
        await write_to_disk(engine_of(model))
        assert engine_of(model).disk_page_cache.metrics["evictions"] > 0
    assert sum(path.stat().st_size for path in (*files(tmp_path, "kv"), *files(tmp_path, "rs"))) <= MIB


@pytest.mark.slow
async def test_damaged_files_cost_tokens_and_nothing_else(tiny_hybrid: Path, tmp_path: Path) -> None:
    """The second of three pages, and the last of three checkpoints: chunks of a page leave one at the end of each.

    The engine notices a checkpoint that is cut short, not one whose bytes have changed.
    """
    dense: dict[str, Any] = {
        "chunk_size": 256,
        "recurrent_checkpoint_interval": 256,
        "recurrent_checkpoint_interval_pp": 256,
    }
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), **FOUR_PAGES, **dense) as model:
        cold = await answered(model, PROMPT)
        keys = [page.phash for page in engine_of(model).pagetable.all_pages if page.kv_position == 256]
        folder = Path(engine_of(model).disk_page_cache.dir)
    page = folder / "pages" / keys[1][:1].hex() / f"{keys[1].hex()}.kv"
    state = folder / "states" / f"{keys[2].hex()}.rs"
    assert page in files(tmp_path, "kv")
    assert state in files(tmp_path, "rs")
    for damage, path, left in ((cut, state, 512), (remove, state, 512), (cut, page, 256), (overwrite, page, 256)):
        damage(path)
        async with loaded(tiny_hybrid, memory=on_disk(tmp_path), **FOUR_PAGES, **dense) as model:
            warm = await answered(model, PROMPT)
            assert warm.finish.usage.cached_tokens == left, (damage.__name__, path.suffix)
            assert warm.token_ids == cold.token_ids
        assert path in files(tmp_path, path.suffix[1:])  # written anew


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))


def remove(path: Path) -> None:
    path.unlink()


async def test_a_full_disk_fails_no_request(tiny_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        disk = engine_of(model).disk_page_cache

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        for method in ("_create_page_file", "_create_state_file"):
            monkeypatch.setattr(disk, method, full)
        cold = await answered(model, PROMPT)
        await answered(model, FILLER)
        warm = await answered(model, PROMPT)
        assert warm.token_ids == cold.token_ids
        assert warm.finish.usage.ram_tokens == FULL_PAGES
        assert await write_to_disk(engine_of(model)) == CacheChange(pages=0, checkpoints=0)
        assert disk.metrics["write_errors"] > 0
    assert files(tmp_path, "kv") == []


async def test_a_folder_that_is_gone_fails_no_request(tiny_hybrid: Path, tmp_path: Path) -> None:
    """What stands in its place cannot be written."""
    async with loaded(tiny_hybrid, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        disk = engine_of(model).disk_page_cache
        put_a_file_in_place_of(disk.pages_dir)
        put_a_file_in_place_of(disk.states_dir)
        cold = await answered(model, PROMPT)
        await answered(model, FILLER)
        assert (await answered(model, PROMPT)).token_ids == cold.token_ids
        assert await write_to_disk(engine_of(model)) == CacheChange(pages=0, checkpoints=0)


def put_a_file_in_place_of(folder: str) -> None:
    os.rmdir(folder)
    Path(folder).touch()


async def test_a_damaged_index_is_made_anew(tiny_llama: Path, tmp_path: Path) -> None:
    async with loaded(tiny_llama, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        await answered(model, PROMPT, max_tokens=1)
        folder = Path(engine_of(model).disk_page_cache.dir)
    overwrite_all(folder / "index.sqlite")
    async with loaded(tiny_llama, memory=on_disk(tmp_path), **FOUR_PAGES) as model:
        assert (await answered(model, PROMPT, max_tokens=1)).finish.usage.disk_tokens == FULL_PAGES


def overwrite_all(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="permissions as on POSIX")
async def test_the_folder_is_made_for_its_owner_alone(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "cache"
    container = ExllamaV3Container.create(
        tiny_llama, load_settings(**FOUR_PAGES).model_copy(update={"memory": on_disk(folder)})
    )
    assert not folder.exists()  # the model that serves may be at work in it
    container.tiers.open_directory()
    container.tiers.open_directory()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_disk_tier_brings_a_tier_in_ram(tiny_llama: Path, tmp_path: Path, log_lines: list[str]) -> None:
    memory = MemoryConfig(disk_cache_dir=str(tmp_path))
    container = ExllamaV3Container.create(tiny_llama, load_settings(**FOUR_PAGES).model_copy(update={"memory": memory}))
    assert container.tiers.engine_arguments() == {
        "cpu_cache_size": DISK_NEEDS_RAM_MB * MIB,
        "disk_cache_dir": str(tmp_path),
    }
    assert any("disk_cache_dir" in line and str(DISK_NEEDS_RAM_MB) in line for line in log_lines)


def test_only_what_is_changed_is_passed_on(tiny_llama: Path, tmp_path: Path) -> None:
    caches = [ExllamaV3Container.create(tiny_llama, load_settings(**FOUR_PAGES)).cache]
    assert plan_tiers(MemoryConfig(), caches)[0].engine_arguments() == {"cpu_cache_size": 0}
    assert plan_tiers(MemoryConfig(disk_cache_write_interval=1), caches)[0].engine_arguments() == {"cpu_cache_size": 0}
    memory = MemoryConfig(
        sysmem_kv_cache=8,
        disk_cache_dir=str(tmp_path / "new"),
        disk_cache_size=100,
        disk_cache_flush_on_idle=False,
        disk_cache_checkpoint_interval=0,
        disk_cache_write_interval=0.5,
    )
    assert plan_tiers(memory, caches)[0].engine_arguments() == {
        "cpu_cache_size": 8 * MIB,
        "disk_cache_dir": str(tmp_path / "new"),
        "disk_cache_size": 100 * MIB,
        "disk_cache_flush_on_idle": False,
        "disk_cache_checkpoint_interval": 0,
        "disk_cache_write_interval": 0.5,
    }


async def test_the_size_of_a_page_is_known_before_loading(tiny_llama: Path) -> None:
    """The engine refuses a tier of less than two pages when the weights are there."""
    async with loaded(tiny_llama, memory=MemoryConfig(sysmem_kv_cache=2), **FOUR_PAGES) as model:
        assert page_bytes([model.cache]) == engine_of(model).cpu_page_cache.slot_size
    settings = load_settings(**FOUR_PAGES).model_copy(update={"memory": MemoryConfig(sysmem_kv_cache=1)})
    cache = ExllamaV3Container.create(tiny_llama, settings).cache
    assert plan_tiers(settings.memory, [cache])[0].ram_bytes == MIB
    with pytest.raises(InvalidRequest, match=r"less than two pages.*at least 2,") as raised:
        plan_tiers(settings.memory, [cache, cache])
    assert raised.value.param == "memory.sysmem_kv_cache"


def test_a_model_without_pages_has_no_tiers(tmp_path: Path) -> None:
    tiers, advice = plan_tiers(on_disk(tmp_path), [])
    assert tiers.engine_arguments() == {"cpu_cache_size": 0}
    assert len(advice) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_loading(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(**FOUR_PAGES)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(InvalidRequest, match="is no folder") as raised:
            ExllamaV3Container.create(tiny_llama, settings.model_copy(update={"memory": on_disk(folder)}))
        assert raised.value.param == "memory.disk_cache_dir"
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InvalidRequest, match="cannot be written") as raised:
        ExllamaV3Container.create(tiny_llama, settings.model_copy(update={"memory": on_disk(tmp_path / "new")}))
    assert raised.value.param == "memory.disk_cache_dir"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_the_engine_might_empty_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """It removes folders with a manifest when the tier is full, whosever they are."""
    cache = [ExllamaV3Container.create(tiny_llama, load_settings(**FOUR_PAGES)).cache]
    for name in ("0123456789abcdef", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "0123456789abcdef" / "manifest.json").touch()
    plan_tiers(on_disk(tmp_path), cache)
    (tmp_path / "notes" / "manifest.json").touch()
    with pytest.raises(InvalidRequest, match="holds notes") as raised:
        plan_tiers(on_disk(tmp_path), cache)
    assert raised.value.param == "memory.disk_cache_dir"


def test_too_little_host_memory_is_noticed_before_a_weight_is_read(tiny_llama: Path) -> None:
    memory = MemoryConfig(sysmem_kv_cache=10**9)
    container = ExllamaV3Container.create(tiny_llama, load_settings(**FOUR_PAGES).model_copy(update={"memory": memory}))
    with pytest.raises(ModelLoadFailed, match="sysmem_kv_cache"):
        next(iter(container.load()))
