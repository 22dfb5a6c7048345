"""The engine's jobs, which make checkpoints where prompts change, keep them, and tell what they found in the caches.

They start in the order of their owners' turns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeAlias

import torch

from backends.exllamav3.cache_lookup import Lookup, leading_pages, look_up
from backends.exllamav3.engine import ENGINE_REQUIREMENT, ENGINE_VERSION, AsyncGenerator, AsyncJob, Job
from backends.exllamav3.turns import Turn, Turns
from common.caching import CacheExplanation, TierName
from common.config_models import PAGE_TOKENS
from common.errors import SettingsError

# What the caches have of a prompt -> why so much of it, and not more.
Explain: TypeAlias = Callable[[Lookup], CacheExplanation]

# Methods of the engine's Job that are replaced here, and their parameters.
REPLACED = {
    "allocate_pages": (),
    "prefill": ("results", "chunk_size"),
    "is_checkpoint_boundary": ("override_interval",),
    "maybe_stash_recurrent": ("cache", "interval"),
    "hash_completed_page": ("seq", "page_idx"),
}
# Below this many entries a ledger is not worth tidying.
SMALL_LEDGER = 64
# A pass over fewer tokens of a prompt takes hardly less time: all weights are read all the same.
SMALLEST_PASS = 128


def check_engine_job(job: type) -> None:
    """Raise SettingsError where the engine's Job is not the one that the jobs of this module stand on."""
    missing = []
    for method, parameters in REPLACED.items():
        known = inspect.signature(getattr(job, method)).parameters if hasattr(job, method) else {}
        if not {"self", *parameters} <= known.keys():
            missing.append(f"{method}({', '.join(parameters)})")
    if missing:
        raise SettingsError(
            f"exllamav3 {ENGINE_VERSION} is installed, but its Job lacks {', '.join(missing)}, which this server "
            f'needs. Install another one of exllamav3 {ENGINE_REQUIREMENT}, such as: pip install "exllamav3==1.6.5"'
        )


check_engine_job(Job)


# --- what was made ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """What is known of a checkpoint beside what its cache says."""

    at: float | None  # seconds, of time.monotonic(); None: this process has read it from disk, and not made it
    boundary: bool  # an anchor: made where a prompt changes, or found there later


class CheckpointLedger:
    """What the recurrent cache does not say of its checkpoints, by their keys; one a container.

    Attributes:
        hits: requests that went on from what was cached; with recurrent layers, from a checkpoint.
        replayed_tokens: of all requests, those cached as keys and values but past the last usable checkpoint.
        served_tokens: of all requests, those that were not processed, by the tier that had them.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.replayed_tokens = 0
        self.served_tokens: Counter[TierName] = Counter()
        self._made: dict[bytes, Made] = {}
        self._tidy_at = SMALL_LEDGER

    def of(self, key: bytes) -> Made | None:
        return self._made.get(key)

    def note(self, key: bytes, *, boundary: bool, held: Callable[[bytes], bool]) -> None:
        """A checkpoint has been made.

        Args:
            held: whether the cache has a checkpoint; what it has no longer is forgotten here now and then.
        """
        self._made[key] = Made(monotonic(), boundary)
        if len(self._made) >= self._tidy_at:
            self.tidy(held)

    def tidy(self, held: Callable[[bytes], bool]) -> None:
        """Forget the checkpoints that the cache has no longer; the counts stay."""
        self._made = {key: made for key, made in self._made.items() if held(key)}
        self._tidy_at = max(SMALL_LEDGER, 2 * len(self._made))

    def note_boundary(self, key: bytes) -> None:
        """A checkpoint that the cache has lies where a prompt changes, whatever it was made for."""
        self._made[key] = replace(self._made.get(key, Made(None, True)), boundary=True)

    def rekey(self, old: bytes, new: bytes) -> None:
        made = self._made.pop(old, None)
        if made is not None:
            self._made.setdefault(new, made)

    def count(self, found: Lookup) -> None:
        self.hits += found.resumed > 0
        self.replayed_tokens += found.matched - found.resumed
        self.served_tokens.update(vram=found.resumed - found.ram - found.disk, ram=found.ram, disk=found.disk)


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where a request's checkpoints go, and who is told.

    Attributes:
        boundaries: ends of full pages at which the prompt gets checkpoints, ascending; see `boundary_pages`.
        explain: is called when the job leaves the queue, before it has changed anything.
    """

    ledger: CheckpointLedger
    boundaries: tuple[int, ...] = ()
    explain: Explain | None = None


class CheckpointJob(Job):  # type: ignore[misc]  # the engine has no annotations
    """A job of the engine with checkpoints at boundaries.

    At each boundary past the point from which it is resumed, a prefill chunk ends and a checkpoint is made: one pass
    more for each at most, and no token more. Up to the last boundary these stand in for the marks of
    `recurrent_checkpoint_interval`; past it, and in a prompt without boundaries, marks fall where the engine puts them.
    Without recurrent layers boundaries mean nothing.

    The cache drops what was unused for longest. So that a long conversation does not push them out, the checkpoints at
    the boundaries of a prompt, and the one at its end, are used again by every request that has them and whenever it
    adds one of its own; the lowest of them most of all, since an edit anywhere can be resumed from it.

    Attributes:
        found: what the caches had of the prompt, in whole pages; None while the job is queued.
        explanation: where the placement asks for it, from the same moment.
    """

    # The engine calls __init__ again for each further segment of an answer; what is set beside it stays.
    placement: Placement
    turns: Turns
    owner: str
    turn: Turn
    found: Lookup | None = None
    explanation: CacheExplanation | None = None
    _anchors: tuple[bytes, ...] = ()  # keys of the checkpoints to keep, the most important one last

    def allocate_pages(self) -> None:
        if self.found is None:
            self._allocate_first()
        else:
            super().allocate_pages()
        self._keep_anchors()

    def prefill(self, results: list[dict[str, Any]], chunk_size: int | None = None) -> None:
        if self.sequences[0].prefill_complete:  # the engine asks every job in every step
            return
        before = self._unprocessed
        self._pass(results, chunk_size)
        if chunk_size is not None and self._unprocessed < before:
            self._share(results, chunk_size, before - self._unprocessed)

    def _pass(self, results: list[dict[str, Any]], chunk_size: int | None) -> None:
        copied: int = self.cached_tokens
        super().prefill(results, self._cut(chunk_size))
        self.placement.ledger.served_tokens["vram"] += self.cached_tokens - copied  # of pages that begin alike
        cache = self.generator.recurrent_cache
        if cache is not None:
            # The engine would ask later in its turn, when another job may be about to write the same page again.
            self.maybe_stash_recurrent(cache)

    def _share(self, results: list[dict[str, Any]], chunk_size: int, tokens: int) -> None:
        """Let other jobs have what this one has left of a chunk.

        Beside jobs that generate, the engine has one prompt a step processed, however short it is: of several that come
        together, the last would wait for as many steps.
        """
        left = chunk_size - max(tokens, SMALLEST_PASS)
        for job in list(self.generator.active_jobs):
            tokens = job._unprocessed
            if not 0 < tokens <= left:
                continue
            left -= max(tokens, SMALLEST_PASS)
            try:
                job._pass(results, chunk_size)
            except Exception as error:  # as the engine does with the job whose turn it is
                self.generator.reap_failed_job(job, error, results)

    @property
    def _unprocessed(self) -> int:
        """Tokens of the prompt that are left for prefill."""
        sequence = self.sequences[0]
        return len(sequence.sequence_ids) - 1 - int(sequence.kv_position)

    def is_checkpoint_boundary(self, override_interval: int | None = None) -> bool:
        position = self.sequences[0].kv_position
        boundaries = self.placement.boundaries
        if override_interval or not boundaries or position > boundaries[-1]:
            return bool(super().is_checkpoint_boundary(override_interval))
        if position in boundaries:
            return True
        previous = self.last_recurrent_checkpoint_pos
        if previous is None:
            previous = self.cached_pages * PAGE_TOKENS
        distance = position - previous
        return position % PAGE_TOKENS == 0 and bool(distance >= self.generator.recurrent_checkpoint_interval_pp)

    def maybe_stash_recurrent(self, cache: Any, interval: int | None = None) -> None:
        position = self.sequences[0].kv_position
        if position == 0 or position % PAGE_TOKENS or position == self.last_recurrent_checkpoint_pos:
            return
        page = self.sequences[0].allocated_pages[position // PAGE_TOKENS - 1]
        if page.kv_position < PAGE_TOKENS or not self.is_checkpoint_boundary(interval):
            return  # a page is short where another job with the same prompt is writing it again
        new = page.phash not in cache
        self._keep_anchors()
        super().maybe_stash_recurrent(cache, interval)
        if new and page.phash in cache:
            boundary = position in self.placement.boundaries
            self.placement.ledger.note(page.phash, boundary=boundary, held=cache.has)

    def hash_completed_page(self, seq: Any, page_idx: int) -> None:
        old: bytes = seq.allocated_pages[page_idx].phash
        super().hash_completed_page(seq, page_idx)
        self.placement.ledger.rekey(old, seq.allocated_pages[page_idx].phash)

    @torch.inference_mode()
    def keep_progress(self) -> None:
        """Make a checkpoint at the end of the last prefill chunk of a job that is about to be cancelled."""
        cache = self.generator.recurrent_cache
        if cache is not None and self in self.generator.active_jobs and not self.is_prefill_done():
            self.maybe_stash_recurrent(cache, PAGE_TOKENS)

    def processed_ids(self) -> list[int]:
        """Of prompt and answer, the tokens that went through the model or were cached."""
        sequence = self.sequences[0]
        # A further segment begins with nothing but what the earlier ones have processed.
        end = len(sequence.sequence_ids) if self.is_requeued else sequence.kv_position
        ids: list[int] = sequence.sequence_ids.torch_slice(0, end).flatten().tolist()
        return ids

    def _allocate_first(self) -> None:
        self.turns.started(self)
        generator, (sequence,) = self.generator, self.sequences
        hashes: list[bytes] = sequence.page_hashes[: sequence.max_cached_pages]
        recurrent = generator.recurrent_cache is not None
        if recurrent:
            self._anchors = self._anchor_keys()
        if self.placement.explain is not None:
            found = look_up(generator, sequence.sequence_ids.torch(), sequence.new_unique_pages)
            self.explanation = self.placement.explain(found)
        # Before the allocation drops pages to make room.
        leading = leading_pages(generator, hashes) if recurrent else 0
        metrics = self.pagetable.metrics
        tier, disk = metrics["alloc_tier_pages"], metrics["alloc_disk_pages"]
        super().allocate_pages()
        if recurrent:
            resumed = self.cached_pages * PAGE_TOKENS
            matched = max(leading * PAGE_TOKENS, resumed)
        else:  # pages past a gap are used as well
            pages = sequence.allocated_pages[: len(hashes)]
            matched = resumed = PAGE_TOKENS * sum(page.kv_position == PAGE_TOKENS for page in pages)
        # The engine may have brought back more than it can go on from.
        from_disk = min((metrics["alloc_disk_pages"] - disk) * PAGE_TOKENS, resumed)
        from_tier = min((metrics["alloc_tier_pages"] - tier) * PAGE_TOKENS, resumed)
        self.found = Lookup(matched, resumed, ram=from_tier - from_disk, disk=from_disk)
        self.placement.ledger.count(self.found)
        if recurrent:
            for position in self.placement.boundaries:
                key = sequence.page_hashes[position // PAGE_TOKENS - 1]
                if key in self.generator.recurrent_cache:
                    self.placement.ledger.note_boundary(key)

    def _anchor_keys(self) -> tuple[bytes, ...]:
        if not self.placement.boundaries:
            return ()
        hashes = self.sequences[0].page_hashes
        lowest, *others = (hashes[position // PAGE_TOKENS - 1] for position in self.placement.boundaries)
        return (*others, hashes[-1], lowest)

    def _keep_anchors(self) -> None:
        cache = self.generator.recurrent_cache
        for key in self._anchors:
            if key in cache:
                cache.move_to_end(key)

    def _cut(self, chunk_size: int | None) -> int | None:
        """The limit for the next chunk, so that it does not go past the next boundary."""
        if self.generator.recurrent_cache is None:
            return chunk_size
        position: int = self.sequences[0].kv_position
        ahead = next((boundary - position for boundary in self.placement.boundaries if boundary > position), None)
        if ahead is None:
            return chunk_size
        return ahead if chunk_size is None else min(ahead, chunk_size)


class AsyncCheckpointJob(AsyncJob):  # type: ignore[misc]  # the engine has no annotations
    """Queues a `CheckpointJob`. The engine's own constructor, which is not called, would make a plain one."""

    def __init__(
        self,
        generator: AsyncGenerator,
        placement: Placement,
        turns: Turns,
        owner: str,
        on_results: Callable[[], None],
        **arguments: Any,
    ) -> None:
        """
        Args:
            turns: of the generator's queue.
            owner: whose job it is; see `GenerationRequest.owner`.
            on_results: is called for each result, when the reader of the job has been woken for it.
            arguments: of the engine's Job.

        Raises:
            AssertionError: the engine does not take the job.
        """
        self.generator = generator
        self.job = CheckpointJob(**arguments)
        self.job.placement = placement
        self.job.turns = turns
        self.job.owner = owner
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        self._on_results = on_results
        generator.enqueue(self)
        if generator.error is None:  # else it has not been queued
            turns.queued(self.job, generator.generator.pending_jobs)

    def put_result(self, result: Any) -> None:
        super().put_result(result)
        self._on_results()

    def keep_progress(self) -> None:
        """See `CheckpointJob`. Nothing after a failure of the generator, whose state nobody knows."""
        if self.generator.error is None:
            self.job.keep_progress()

    async def cancel(self) -> None:
        queue = self.generator.generator.pending_jobs
        never_started = self.job.found is None and self.job in queue
        await super().cancel()
        if never_started:
            self.job.turns.withdrawn(self.job, queue)
