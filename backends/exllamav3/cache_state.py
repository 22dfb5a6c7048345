"""What a live generator's caches hold, and how they are written to disk and emptied."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

from backends.exllamav3.checkpoints import checkpoint_info
from backends.exllamav3.engine import Generator, is_content_hash, set_cache_root
from backends.exllamav3.jobs import CheckpointLedger
from backends.exllamav3.prompt_history import PromptHistory
from backends.exllamav3.tiers import write_to_disk
from common.caching import CacheChange, CacheState, Checkpoint, CheckpointsState, TierState
from common.config_models import PAGE_TOKENS
from common.errors import EngineFailed, Unsupported

# Where the pages that prompts of the plain model begin with are kept while other ones are looked for.
_PLAIN: Final = b"the plain model"

# --- what they hold ---------------------------------------------------------------------------------------------------


def observe(generator: Generator, ledger: CheckpointLedger) -> CacheState:
    """The state at this moment.

    Args:
        ledger: of the generator's checkpoints.
    """
    resumable = _resumable_pages(generator)
    return CacheState(
        tiers=list(_tiers(generator, ledger, resumable)),
        checkpoints=_checkpoints(generator, ledger, resumable),
        active_requests=len(generator.active_jobs),
        queued_requests=len(generator.pending_jobs),
    )


def _tiers(generator: Generator, ledger: CheckpointLedger, resumable: set[bytes]) -> Iterator[TierState]:
    table, ram, disk = generator.pagetable, generator.cpu_page_cache, generator.disk_page_cache
    page_bytes = _page_bytes(generator)
    used = sum(page.phash in resumable for page in _complete_pages(generator))
    yield TierState(
        tier="vram",
        capacity_tokens=table.max_pages * PAGE_TOKENS,
        capacity_bytes=table.max_pages * page_bytes,
        used_tokens=used * PAGE_TOKENS,
        used_bytes=used * page_bytes,
        active_tokens=len(table.referenced_pages) * PAGE_TOKENS,
        hit_tokens=ledger.served_tokens["vram"],
        evicted_tokens=table.metrics["evictions_live"] * PAGE_TOKENS,
    )
    if ram is not None:
        used = sum(page_hash in resumable for page_hash in ram.entries)
        yield TierState(
            tier="ram",
            capacity_tokens=ram.max_slots * PAGE_TOKENS,
            capacity_bytes=ram.max_slots * ram.slot_size,
            used_tokens=used * PAGE_TOKENS,
            used_bytes=used * ram.slot_size,
            active_tokens=0,
            hit_tokens=ledger.served_tokens["ram"],
            evicted_tokens=ram.metrics["evictions"] * PAGE_TOKENS,
        )
    if disk is not None:
        pages = _held_on_disk(disk, disk.pages)
        used = sum(page_hash in resumable for page_hash in pages)
        yield TierState(
            tier="disk",
            capacity_tokens=disk.max_size // disk.image_size * PAGE_TOKENS,
            capacity_bytes=disk.max_size,
            used_tokens=used * PAGE_TOKENS,
            used_bytes=sum(page["size"] for page in pages.values()),
            active_tokens=0,
            hit_tokens=ledger.served_tokens["disk"],
            evicted_tokens=disk.metrics["evictions"] * PAGE_TOKENS,
        )


def _checkpoints(generator: Generator, ledger: CheckpointLedger, resumable: set[bytes]) -> CheckpointsState | None:
    held, disk = generator.recurrent_cache, generator.disk_page_cache
    info = checkpoint_info(generator)
    if info is None:
        return None
    now = monotonic()

    def entry(key: bytes, position: int, size: int, *, on_disk: bool) -> Checkpoint:
        made = ledger.of(key)
        return Checkpoint(
            position=position,
            bytes=size,
            age_seconds=None if made is None or made.at is None else now - made.at,
            tier="disk" if on_disk else "ram",
            usable=key in resumable,
            boundary=made is not None and made.boundary,
        )

    entries = [
        entry(key, stashed["position"], stashed["checkpoint_size"], on_disk=False) for key, stashed in held.items()
    ]
    entries.sort(key=lambda checkpoint: checkpoint.usable)  # what no prompt can use is dropped first
    if disk is not None:
        entries += [
            entry(key, state["position"], state["size"], on_disk=True)
            for key, state in _held_on_disk(disk, disk.states).items()
            if key not in held
        ]
    return CheckpointsState(
        capacity_bytes=held.max_size,
        used_bytes=held.current_size,
        checkpoint_bytes=info.bytes,
        capacity=info.capacity,
        hits=ledger.hits,
        replayed_tokens=ledger.replayed_tokens,
        evictions=held.metrics["stash_evictions"],
        evictions_usable=held.metrics["stash_evictions_live_kv"],
        pruned=held.metrics["stash_pruned"],
        entries=entries,
    )


def _complete_pages(generator: Generator) -> Iterator[Any]:
    for page in generator.pagetable.all_pages:
        if page.kv_position == PAGE_TOKENS and is_content_hash(page.phash):
            yield page


def _resumable_pages(generator: Generator) -> set[bytes]:
    """Pages, in any tier, before which none is missing."""
    ram, disk = generator.cpu_page_cache, generator.disk_page_cache
    previous: dict[bytes, bytes | None] = {}
    if disk is not None:
        previous |= {key: page["prev_hash"] for key, page in _held_on_disk(disk, disk.pages).items()}
    if ram is not None:
        previous |= {key: entry["prev_hash"] for key, entry in ram.entries.items()}
    previous |= {page.phash: page.prev_hash for page in _complete_pages(generator)}

    resumable: dict[bytes | None, bool] = {None: True}
    for start in previous:
        chain = []
        page: bytes | None = start
        while page is not None and page in previous and page not in resumable:
            resumable[page] = False  # until its beginning is found
            chain.append(page)
            page = previous[page]
        reached = resumable.get(page, False)
        resumable |= dict.fromkeys(chain, reached)
    return {page for page, reached in resumable.items() if reached and page is not None}


def _held_on_disk(disk: Any, index: dict[bytes, dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    with disk._lock:  # its writer thread adds to the index
        return dict(index)


def _page_bytes(generator: Generator) -> int:
    """VRAM of one page, of the model and its drafter together."""
    caches = [cache for cache in (generator.cache, generator.draft_cache) if cache is not None]
    size = sum(int(layer.storage_size()) for cache in caches for layer in cache.layers.values())
    return size // int(generator.pagetable.max_pages)


# --- writing and dropping it ------------------------------------------------------------------------------------------


async def flush(generator: Generator) -> CacheChange:
    """Write all complete pages and their checkpoints to the disk tier, while requests go on.

    Raises:
        Unsupported: there is no disk tier.
        EngineFailed: it does not take what is written.
    """
    disk = generator.disk_page_cache
    if disk is None:
        raise Unsupported(
            "There is no disk tier to write the cache to. Set memory.disk_cache_dir and load the model again."
        )
    if disk.write_disabled:
        raise EngineFailed("The disk tier does not take anything more; the log says why. Check memory.disk_cache_dir.")
    return await write_to_disk(generator)


async def clear(generator: Generator, ledger: CheckpointLedger, history: PromptHistory) -> CacheChange:
    """Forget everything that no running request uses, in all tiers, and the prompts that were served.

    Args:
        ledger: of the generator's checkpoints.
        history: of the prompts that it has served.
    """
    disk, checkpoints = generator.disk_page_cache, generator.recurrent_cache
    if disk is not None:
        with disk._lock:
            disk.state_candidates.clear()
            disk._drop_queued_writes()
        await _written(disk)  # what was being written would be there again afterwards
    held = _checkpoint_keys(generator)
    pages = _clear_vram(generator)
    if generator.cpu_page_cache is not None:
        pages |= _clear_ram(generator.cpu_page_cache)
    if disk is not None:
        pages |= _clear_disk(disk)
    if checkpoints is not None:
        checkpoints.prune_stranded()  # those whose pages are gone by now
        ledger.tidy(checkpoints.has)
    history.clear()
    dropped = len(held - _checkpoint_keys(generator))
    if disk is not None:
        await _written(disk)
    return CacheChange(pages=len(pages), checkpoints=dropped)


def change_root(generator: Generator, old: bytes | None, new: bytes | None) -> None:
    """Have pages found by prompts of their own root only. To be called between requests; see `set_cache_root()`.

    By its hash a page is found by those in any case. But without recurrent layers the engine also copies keys and
    values from a page that begins like the one it needs and follows the same page, and those that follow none would all
    do.
    """
    set_cache_root(new)
    if generator.recurrent_cache is not None:  # whose checkpoints would be taken for useless
        return
    for page in generator.pagetable.all_pages:
        if page.prev_hash is None and page.kv_position:
            page.prev_hash = old or _PLAIN
        if page.prev_hash == (new or _PLAIN):
            page.prev_hash = None


def _clear_vram(generator: Generator) -> set[bytes]:
    # Between two segments of an answer, its request holds no page and is about to claim them again.
    used = {key for job in generator.pending_jobs if job.is_requeued for key in job.all_unique_hashes}
    dropped = set()
    for page in list(generator.pagetable.unreferenced_pages.values()):
        if page.phash not in used:
            if page.kv_position == PAGE_TOKENS and is_content_hash(page.phash):
                dropped.add(page.phash)
            page.clear()
    for page in generator.pagetable.referenced_pages.values():
        if page.can_revert:
            # Reserved for an answer and not yet written: it would become what it was if the answer does not get there.
            page.can_revert = False
            if page.kv_position_revert == PAGE_TOKENS and is_content_hash(page.phash_revert):
                dropped.add(page.phash_revert)
    return dropped


def _clear_ram(tier: Any) -> set[bytes]:
    dropped = {page_hash for page_hash, entry in tier.entries.items() if not tier._busy(page_hash, entry)}
    for page_hash in dropped:
        tier.free_slots.append(tier.entries.pop(page_hash)["slot"])
    return dropped


def _clear_disk(disk: Any) -> set[bytes]:
    with disk._lock:
        pages = set(disk.pages)
        for page_hash in pages:
            disk._drop("page", page_hash)
        for key in list(disk.states):
            disk._drop("state", key)
    return pages


def _checkpoint_keys(generator: Generator) -> set[bytes]:
    held, disk = generator.recurrent_cache, generator.disk_page_cache
    keys = set() if held is None else set(held)
    return keys if disk is None else keys | set(_held_on_disk(disk, disk.states))


async def _written(disk: Any) -> None:
    """Wait until what is queued for the disk is there. The thread waits and does nothing else."""
    await asyncio.to_thread(disk.flush)
