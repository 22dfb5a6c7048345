"""What a prompt would find in the caches of a live generator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

from backends.exllamav3.checkpoints import page_floor
from backends.exllamav3.engine import Generator, Sequence, Tensor, kernels
from common.config_models import PAGE_TOKENS


@dataclass(frozen=True)
class Lookup:
    """What a prompt finds in the caches, in tokens from its beginning.

    Without recurrent layers, what is cached past a gap counts as well: `matched` and `resumed` are then numbers of
    tokens rather than positions.

    Attributes:
        matched: whose keys and values are cached, in any tier.
        resumed: from which the prompt is gone on from; less than `matched` where no checkpoint lies as far on.
        ram: of `resumed`, those in the page tier in host RAM only.
        disk: of `resumed`, those on disk only.
    """

    matched: int
    resumed: int
    ram: int
    disk: int


def look_up(generator: Generator, ids: Tensor, new_pages: int = 1) -> Lookup:
    """What a job with this prompt would find if the engine took it now. Changes nothing.

    The engine's own allocation runs on a copy of its page table: which pages it drops to make room decides what else
    is found. Files on disk that turn out damaged are not foreseen.

    Args:
        ids: (1, tokens), without a token that is healed.
        new_pages: what the job claims beyond the complete pages of its prompt (`Sequence.new_unique_pages`).
    """
    prompt = _sequence(generator, ids)
    prompt.new_unique_pages = new_pages
    hashes: list[bytes] = prompt.page_hashes[: prompt.max_cached_pages]
    claimed = len(prompt.page_hashes) - sum(page_hash in generator.pagetable.referenced_pages for page_hash in hashes)
    table = _copy_of(generator.pagetable, room_for=claimed + new_pages)
    restored: dict[bytes, bool] = {}  # page from another tier -> whether it was on disk only
    if table.cpu_tier is not None:
        table.cpu_tier = _copy_of_tier(table.cpu_tier, table, restored)
    checkpoints = generator.recurrent_cache
    prompt.allocate_pages(table, None if checkpoints is None else _Known(checkpoints.has), set(hashes))

    if checkpoints is None:
        resumed = matched = _found_in_prefill(generator, prompt, table)
        used = hashes
    else:
        resumed = prompt.kv_position
        matched = max(resumed, PAGE_TOKENS * leading_pages(generator, hashes))
        used = hashes[: resumed // PAGE_TOKENS]
    from_disk = [restored[page_hash] for page_hash in used if page_hash in restored]
    disk = sum(from_disk)
    return Lookup(matched, resumed, ram=(len(from_disk) - disk) * PAGE_TOKENS, disk=disk * PAGE_TOKENS)


def usable_hashes(generator: Generator, ids: Tensor) -> list[bytes]:
    """Hashes of the pages of a prompt that can be served from a cache: the full ones before its last token."""
    sequence = _sequence(generator, ids)
    hashes: list[bytes] = sequence.page_hashes[: sequence.max_cached_pages]
    return hashes


def leading_pages(generator: Generator, hashes: list[bytes]) -> int:
    """Of a prompt's pages, those from the beginning that are complete in some tier."""
    tier = generator.pagetable.cpu_tier
    disk = None if tier is None else tier.disk_tier
    for index, page_hash in enumerate(hashes):
        page = page_in_vram(generator, page_hash)
        if page is not None:
            cached = page.kv_position == PAGE_TOKENS  # else a job fills it, or was cancelled before it could
        else:
            cached = tier is not None and (page_hash in tier or (disk is not None and disk.has_page(page_hash)))
        if not cached:
            return index
    return len(hashes)


def page_in_vram(generator: Generator, page_hash: bytes) -> Any:
    """The engine's page that has, or shall get, these contents; None where no page does."""
    table = generator.pagetable
    return table.referenced_pages.get(page_hash) or table.unreferenced_pages.get(page_hash)


def _sequence(generator: Generator, ids: Tensor) -> Any:
    """A prompt with the hashes of its pages, as `Job.prepare_for_queue` has it."""
    sequence = Sequence(ids, ids)
    sequence.prepare(False, 0)
    if generator.mtp_draft:  # the last token's hidden state has to be computed
        sequence.max_cached_pages = max(0, (ids.shape[-1] - 2) // PAGE_TOKENS)
    return sequence


def _found_in_prefill(generator: Generator, prompt: Any, table: Any) -> int:
    """Tokens that `Job.prefill` of a model without recurrent layers does not process, on a copied page table.

    Beside the pages from the beginning it skips complete ones past a gap, and copies the keys and values of the first
    tokens of a page from another one that follows the same pages and begins like it.
    """
    ids: Tensor = prompt.sequence_ids.torch()
    end_of_prefill = ids.shape[-1] - 1
    shared = any(job.is_prefill_done() for job in generator.active_jobs)
    chunk_size = generator.shared_chunk_size if shared else generator.max_chunk_size
    pages = prompt.allocated_pages
    complete = [page.kv_position == PAGE_TOKENS for page in pages]
    position: int = prompt.kv_position
    found = position
    while position < end_of_prefill:
        window = min(page_floor(position + generator.max_chunk_size), end_of_prefill)
        last_page = -(-window // PAGE_TOKENS)
        index = position // PAGE_TOKENS
        while index < last_page and complete[index]:
            index += 1
            position = index * PAGE_TOKENS
            found += PAGE_TOKENS
        ahead = next((page for page in range(index, last_page) if complete[page]), None)
        end = window if ahead is None else ahead * PAGE_TOKENS
        end = min(end, page_floor(position + chunk_size))
        if end <= position:
            continue
        if position % PAGE_TOKENS == 0:
            copied = _partial_match(table, pages, index, ids[:, position:end])
            if generator.mtp_draft and end == end_of_prefill:
                copied = min(copied, end - position - 1)
            if copied > 1:
                found += copied
        position = end
    return found


def _partial_match(table: Any, pages: list[Any], index: int, ids: Tensor) -> int:
    previous = None if index == 0 else pages[index - 1].phash
    return max(
        (
            kernels.count_match_tensor(page.sequence.tensor, ids, page.kv_position)
            for page in table.all_pages
            if page.prev_hash == previous and page is not pages[index] and page.kv_position
        ),
        default=0,
    )


# --- copies that can be allocated from without a trace ---------------------------------------------------------------


class _Known:
    """Stands in for the recurrent cache: which checkpoints there are, without touching or reading one."""

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self.has = has

    def get_stashed(self, page_hash: bytes) -> bool | None:
        return self.has(page_hash) or None


class _Tokens:
    """Stands in for the tokens of a page, which the engine overwrites in place."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    def clone(self) -> _Tokens:
        return self

    def copy_(self, tensor: Tensor | None) -> None:
        self.tensor = tensor


class _DiskIndex:
    """Stands in for the disk tier: what it holds, without reading or writing anything."""

    def __init__(self, disk: Any) -> None:
        self.has_page = disk.has_page
        self.page_prev_hash = disk.page_prev_hash
        self.pending_pages = set(disk.pending_pages)

    def submit_promotion(
        self, page_hash: bytes, slot: int, done: Callable[[Tensor | bool], None], wait_for: list[Any]
    ) -> None:
        done(True)  # the tokens of a page of the prompt are known, and not looked at

    def write_page(self, *arguments: Any) -> None: ...

    def flush(self) -> None: ...


def _twin(original: Any) -> Any:
    """A shallow copy; quicker than `copy.copy`, and there may be thousands."""
    twin = object.__new__(type(original))
    twin.__dict__.update(original.__dict__)
    return twin


def _copy_of(table: Any, room_for: int) -> Any:
    """A page table that can be allocated from without a trace.

    A job waits while other jobs hold the pages that it needs; in the copy it gets as many from nowhere.
    """
    copied = _twin(table)
    copied.metrics = dict(table.metrics)
    copied.all_pages, copied.referenced_pages, copied.unreferenced_pages = [], {}, {}
    for page in table.all_pages:
        twin = _twin(page)
        twin.pagetable = copied
        twin.sequence = _Tokens(page.sequence)
        copied.all_pages.append(twin)
        (copied.referenced_pages if page.ref_count else copied.unreferenced_pages)[page.phash] = twin
    for index in range(room_for - len(copied.unreferenced_pages)):
        spare = _twin(copied.all_pages[0])
        spare.phash = spare.phash_revert = b"spare" + index.to_bytes(11, "big")
        spare.sequence = _Tokens(None)
        spare.prev_hash = None
        spare.ref_count = spare.kv_position = 0
        copied.all_pages.append(spare)
        copied.unreferenced_pages[spare.phash] = spare
    return copied


def _copy_of_tier(tier: Any, table: Any, restored: dict[bytes, bool]) -> Any:
    """The page tier in host RAM, to which pages can be pushed and from which they can be taken without a trace."""

    class Copy(type(tier)):  # type: ignore[misc]  # exllamav3 has no types
        def fetch(self, page_hash: bytes, page_index: int, serial: int) -> Any:
            entry = super().fetch(page_hash, page_index, serial)
            if entry is not None:
                restored[page_hash] = entry.get("from_disk", False)
            return entry

    copied = _twin(tier)
    copied.__class__ = Copy
    copied.pagetable = table
    copied.segments, copied.tp_groups, copied.tp, copied._devices = [], [], False, []  # no bytes are moved
    copied.slot_events = {}
    copied.metrics = dict(tier.metrics)
    copied.free_slots, copied._order = deque(tier.free_slots), deque(tier._order)
    copied.entries = {page_hash: dict(entry) for page_hash, entry in tier.entries.items()}
    copied.disk_tier = None if tier.disk_tier is None else _DiskIndex(tier.disk_tier)
    for page_hash, entry in copied.entries.items():
        reading: Event | None = entry["pending"]
        if reading is not None and not reading.is_set():  # not to be waited for
            entry["pending"] = None
            copied.disk_tier.pending_pages.add(page_hash)
    return copied
