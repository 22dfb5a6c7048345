"""The tiers behind the key/value cache: pages in host RAM and, with recurrent checkpoints, on disk."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from loguru import logger

from backends.exllamav3.checkpoints import MIB
from backends.exllamav3.engine import Cache, Generator, check_host_memory
from backends.exllamav3.options import changed
from common.caching import CacheChange
from common.config_models import PAGE_TOKENS, MemoryConfig
from common.errors import InvalidRequest, ModelLoadFailed

# MB of host RAM where only a tier on disk is asked for, which is written and read through host RAM.
DISK_NEEDS_RAM_MB = 1024
# The engine's limits of a tier in host RAM: fewer pages are refused, and a slot is a multiple of so many bytes.
LEAST_PAGES = 2
SLOT_BYTES = 4096
# Files in the folder of one model in the tier on disk.
MANIFEST, INDEX = "manifest.json", "index.sqlite"
DISK_SETTING = "memory.disk_cache_dir"
# Seconds between two looks at what is still to be written, and between two lines about it in the log.
POLL_SECONDS = 0.02
REPORT_SECONDS = 3.0


@dataclass(frozen=True)
class Tiers:
    """Arguments of the generator for the tiers that are wanted.

    Attributes:
        ram_bytes: of host RAM for pages; 0: no tier at all.
        directory: of the tier on disk; None: there is none.
        options: further arguments, for the tier on disk.
    """

    ram_bytes: int
    directory: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def engine_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"cpu_cache_size": self.ram_bytes}
        if self.directory is not None:
            arguments |= {"disk_cache_dir": str(self.directory), **self.options}
        return arguments

    def check_memory(self) -> None:
        """Raise ModelLoadFailed where host RAM lacks room for the pages, which the engine claims all at once."""
        if not self.ram_bytes:
            return
        try:
            check_host_memory(self.ram_bytes, f"memory.sysmem_kv_cache ({self.ram_bytes // MIB})")
        except RuntimeError as error:
            raise ModelLoadFailed(f"{error} Or lower memory.sysmem_kv_cache.") from error

    def open_directory(self) -> None:
        """Make the directory, for this user alone: what is in it tells what was in the prompts."""
        if self.directory is None:
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for index in self.directory.glob(f"*/{INDEX}"):
            if _is_corrupt(index):
                logger.warning("{} is damaged; it is removed, and made anew from the files beside it.", index)
                for suffix in ("", "-wal", "-shm"):
                    index.with_name(INDEX + suffix).unlink(missing_ok=True)


def plan_tiers(memory: MemoryConfig, caches: Sequence[Cache]) -> tuple[Tiers, list[str]]:
    """The tiers that the settings ask for, and advice about them. Looks at folders and touches none.

    Args:
        caches: the model's, and the drafter's if it has one; they need not be loaded.

    Raises:
        InvalidRequest: the tier in host RAM is too small for this model, or the folder cannot be written.
    """
    megabytes = memory.sysmem_kv_cache
    if memory.disk_cache_dir and not megabytes:
        megabytes = DISK_NEEDS_RAM_MB
    if not megabytes:
        return Tiers(ram_bytes=0), []
    page = page_bytes(caches)
    if not page:
        return Tiers(ram_bytes=0), [
            "memory.sysmem_kv_cache and disk_cache_dir have no effect: this model has no key/value cache in pages."
        ]
    if megabytes * MIB < LEAST_PAGES * page:
        least = -(-LEAST_PAGES * page // MIB)
        raise InvalidRequest(
            f"memory.sysmem_kv_cache {megabytes} is less than two pages of this model's cache. Set it to 0 or to at "
            f"least {least}, better far more.",
            param="memory.sysmem_kv_cache",
        )
    if not memory.disk_cache_dir:
        return Tiers(megabytes * MIB), []

    directory = Path(memory.disk_cache_dir).absolute()
    _check_writable(directory)
    if megabytes != memory.sysmem_kv_cache:
        logger.info(
            "memory.disk_cache_dir goes through host RAM, of which {} MB are used: memory.sysmem_kv_cache is 0.",
            megabytes,
        )
    options = changed(memory, "disk_cache_flush_on_idle", "disk_cache_checkpoint_interval", "disk_cache_write_interval")
    if changed(memory, "disk_cache_size"):
        options["disk_cache_size"] = memory.disk_cache_size * MIB
    return Tiers(megabytes * MIB, directory, options), []


def page_bytes(caches: Sequence[Cache]) -> int:
    """Host RAM that one page of all caches together takes; 0 where they have no pages."""
    size = 0
    for cache in caches:
        size += sum(int(layer.storage_size()) for layer in cache.layers.values()) * PAGE_TOKENS // cache.max_num_tokens
    return -(-size // SLOT_BYTES) * SLOT_BYTES


def _check_writable(directory: Path) -> None:
    """Raise InvalidRequest for a folder that could not be made or written.

    Nothing is tried out: the model that serves may be using it.
    """
    param = DISK_SETTING
    existing = next((path for path in (directory, *directory.parents) if os.path.exists(path)), None)
    if existing is None or not existing.is_dir():
        raise InvalidRequest(f"{param} {directory} cannot be made: {existing} is no folder. Name another.", param=param)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequest(
            f"{param} {directory} cannot be written: {existing} is not ours to write. Name another folder, or change "
            "its owner.",
            param=param,
        )
    if existing == directory:
        # The engine takes every folder with a manifest for a cache, which it may remove when the tier on disk is full.
        for manifest in directory.glob(f"*/{MANIFEST}"):
            if not re.fullmatch(r"[0-9a-f]{16}", manifest.parent.name):
                raise InvalidRequest(
                    f"{param} {directory} holds {manifest.parent.name}, which the engine might take for its own and "
                    "remove. Name a folder that has nothing else in it.",
                    param=param,
                )


def _is_corrupt(index: Path) -> bool:
    """Whether the engine would fail on the index of a disk tier. It needs none: the files tell the same."""
    try:
        with closing(sqlite3.connect(index)) as connection:
            for table in ("pages", "states"):
                connection.execute(f"SELECT * FROM {table}").fetchall()
    except sqlite3.OperationalError:  # locked, or without tables yet
        return False
    except sqlite3.DatabaseError:
        return True
    return False


async def write_to_disk(generator: Generator) -> CacheChange:
    """Write what is only in VRAM or host RAM to the tier on disk, and wait until it is there.

    Requests go on meanwhile. While it lasts and gets on, the log says so. Ends early where nothing can be written any
    more, as on a full disk; the engine has logged why.

    Returns:
        What was written since the call, for requests that go on included.
    """
    disk, tier = generator.disk_page_cache, generator.cpu_page_cache
    assert disk is not None
    before = _written(disk)
    reported, reported_left = monotonic(), None
    more = True
    while more:
        begun = _written(disk)
        # In steps of half the tier in host RAM: what is written must lie there, and the engine does not wait for room.
        more = generator.flush_cache_to_disk(max_pages=max(1, tier.max_slots // 2))["more"]
        while left := len(disk.pending_pages) + len(disk.pending_states):
            await asyncio.sleep(POLL_SECONDS)
            if monotonic() - reported > REPORT_SECONDS and left != reported_left:
                reported, reported_left = monotonic(), left
                logger.info("Writing the cache to disk; {} pages and checkpoints of this step are left", left)
        if _written(disk) == begun:
            break
    after = _written(disk)
    return CacheChange(pages=after.pages - before.pages, checkpoints=after.checkpoints - before.checkpoints)


def _written(disk: Any) -> CacheChange:
    """What the tier on disk has written since the model was loaded."""
    return CacheChange(pages=disk.metrics["page_writes"], checkpoints=disk.metrics["state_writes"])
