"""Recurrent checkpoints: settings, advice, the plan for a prompt, and what they cost.

A hybrid model's recurrent state cannot be rolled back, so the engine copies it to host RAM now and then while it reads
a prompt. A later prompt resumes from the last such *mark* that lies at or below the first token that differs.

Plain arithmetic: neither torch nor the engine is imported, so the server process can use it too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

from backends.messages import CheckpointInfo
from common.caching import PlanBasis
from common.config_models import PAGE_TOKENS, ModelParameters
from common.errors import InvalidRequest

DEFAULT_INTERVAL = 2048  # of a model that does not name another
DEFAULT_INTERVAL_PP = 32768
DEFAULT_BOUNDARIES: int = ModelParameters.model_fields["recurrent_checkpoint_boundaries"].default

INTERVAL_KEY = "recurrent_checkpoint_interval"
INTERVAL_PP_KEY = "recurrent_checkpoint_interval_pp"
TARGET_KEY = "recurrent_checkpoint_target"
BOUNDARIES_KEY = "recurrent_checkpoint_boundaries"
CHUNK_KEY = "chunk_size"
BUDGET_KEY = "sysmem_recurrent_cache"

MIB = 1024**2


@dataclass(frozen=True)
class CheckpointIntervals:
    """The two settings as the user gave them, in tokens; None leaves the engine's default in force.

    Attributes:
        interval: least distance of marks in generated text and in the last 2 x chunk_size tokens of a prompt.
        interval_pp: the same for the rest of a prompt.
    """

    interval: int | None = None
    interval_pp: int | None = None

    def engine_arguments(self) -> dict[str, int]:
        """Keyword arguments for the engine's Generator, which does not take an explicit None for the second."""
        arguments = {INTERVAL_KEY: self.interval, INTERVAL_PP_KEY: self.interval_pp}
        return {name: value for name, value in arguments.items() if value is not None}


# --- advice ---------------------------------------------------------------------------------------------------------


def advise(
    intervals: CheckpointIntervals,
    *,
    basis: PlanBasis | None,
    default_interval: int,
    target: int | str | None = None,
    boundaries: int = DEFAULT_BOUNDARIES,
) -> list[str]:
    """Sentences for the log about settings that are valid but will not do what they seem to.

    Args:
        intervals: as the user gave them.
        basis: of the model, with what was chosen for a target; None: it has no recurrent layers.
        default_interval: the model's default for the first interval.
        target: recurrent_checkpoint_target.
        boundaries: recurrent_checkpoint_boundaries. Its default counts as not set.
    """
    if basis is None:
        return _without_recurrent_layers(intervals, target, boundaries)
    return [
        *_about_intervals(intervals, basis, default_interval, target),
        *_about_budget(basis, boundaries),
    ]


def _without_recurrent_layers(intervals: CheckpointIntervals, target: int | str | None, boundaries: int) -> list[str]:
    keys = [*intervals.engine_arguments()]
    if target is not None:
        keys.append(TARGET_KEY)
    if boundaries not in (0, DEFAULT_BOUNDARIES):
        keys.append(BOUNDARIES_KEY)
    if not keys:
        return []
    return [f"{enumerated(keys)} {'has' if len(keys) == 1 else 'have'} no effect: this model has no recurrent layers."]


def _about_intervals(
    intervals: CheckpointIntervals, basis: PlanBasis, default_interval: int, target: int | str | None
) -> Iterator[str]:
    arguments = intervals.engine_arguments()
    chosen: dict[int, list[str]] = {}  # value -> the keys that have it
    for key, value in arguments.items():
        chosen.setdefault(value, []).append(key)
    for value, keys in chosen.items():
        setting = f"{enumerated(keys)} {'is' if len(keys) == 1 else 'are'} {value}"
        distance = _prompt_distance(value, basis.chunk_size)
        if distance != value:
            yield (
                f"{setting}, but a prompt gets checkpoints only where a prefill chunk ends: with chunk_size "
                f"{basis.chunk_size} they are {distance} tokens apart. Set chunk_size to "
                f"{_exact_chunk(value, basis.chunk_size)} for checkpoints every {value} tokens."
            )
        if value >= basis.cache_size:
            yield (
                f"{setting}, and the cache holds {basis.cache_size} tokens: no prompt gets that far. "
                "Use less than cache_size."
            )
    if target is not None and len(arguments) == 2:
        yield f"{TARGET_KEY} has no effect: both intervals are set. Leave them empty to have them derived from it."
    elif target is not None and arguments:
        (key,) = arguments
        yield f"{key} is set, so {TARGET_KEY} says only the other interval. Leave it empty to have both derived."
    elif intervals.interval_pp is not None and intervals.interval is None:
        rest = _prompt_distance(intervals.interval_pp, basis.chunk_size)
        if _prompt_distance(default_interval, basis.chunk_size) > rest:
            yield (
                f"{INTERVAL_PP_KEY} is {intervals.interval_pp}, but {INTERVAL_KEY} is left at {default_interval}, "
                f"which applies to the last {2 * basis.chunk_size} tokens of a prompt: checkpoints are missing there. "
                "Set both."
            )


def _about_budget(basis: PlanBasis, boundaries: int) -> Iterator[str]:
    capacity = basis.budget_bytes // basis.checkpoint_bytes
    budget = f"memory.{BUDGET_KEY} is {basis.budget_bytes // MIB}"
    if capacity == 0:
        least, better = (_megabytes(count * basis.checkpoint_bytes) for count in (1, boundaries + 2))
        yield (
            f"{budget}, but one checkpoint takes {readable_bytes(basis.checkpoint_bytes)}: none is kept, and any edit "
            f"has the whole prompt processed again. Set it to {least} at least"
            f"{f', better to {better}' if better > least else ''}."
        )
    elif boundaries and capacity < boundaries + 2:
        # The end of the system prompt, the user's turns, the last page.
        yield (
            f"{BOUNDARIES_KEY} is {boundaries}, for {boundaries + 2} checkpoints in a conversation, but {budget} and "
            f"holds {capacity}: some are dropped before they are used. Set it to "
            f"{_megabytes((boundaries + 2) * basis.checkpoint_bytes)} at least."
        )


def enumerated(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def readable_bytes(count: int) -> str:
    """ "512 bytes", "18.5 KiB", "148 MiB"."""
    size, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _megabytes(count: int) -> int:
    return -(-count // MIB)


def _prompt_distance(interval: int, chunk_size: int) -> int:
    """Distance of marks in a long prompt: the first chunk end that is at least `interval` past the last mark."""
    step = page_floor(chunk_size)
    return -(-interval // step) * step


def _exact_chunk(interval: int, chunk_size: int) -> int:
    """The largest chunk, up to the present one, whose ends include every multiple of `interval`."""
    largest = page_floor(min(chunk_size, interval))
    return next(chunk for chunk in range(largest, 0, -PAGE_TOKENS) if interval % chunk == 0)


# --- the plan for one prompt ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointPlan:
    """Where a prompt, served alone and not cached before, gets its marks, and what an edit of it costs then.

    Positions are token indices from 0. The last token of a prompt is not part of prefill, so at most
    `prompt_tokens - 1` tokens are processed.

    Attributes:
        marks: positions of the marks set, ascending.
        anchors: those of them that lie at boundaries.
        passes: forward passes of the prefill.
        checkpoint_bytes: host RAM of one checkpoint.
        budget_bytes: host RAM for all; memory.sysmem_recurrent_cache.
    """

    prompt_tokens: int
    marks: tuple[int, ...]
    anchors: tuple[int, ...]
    passes: int
    checkpoint_bytes: int
    budget_bytes: int

    @property
    def bytes(self) -> int:
        """Host RAM that all marks take together, whether they fit or not."""
        return len(self.marks) * self.checkpoint_bytes

    @property
    def capacity(self) -> int:
        """How many checkpoints fit the budget."""
        return self.budget_bytes // self.checkpoint_bytes

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The marks still there after the prompt, ascending.

        When the budget is full, the oldest is dropped; those at boundaries are kept young, the lowest most of all.
        """
        if self.capacity == 0:
            return ()
        if self.capacity >= len(self.marks):  # as almost always; a long prompt may have thousands
            return self.marks
        young_last: dict[int, None] = {}
        for mark in self.marks:
            for anchor in (*self.anchors[1:], *self.anchors[:1]):
                if anchor in young_last:
                    del young_last[anchor]
                    young_last[anchor] = None
            if len(young_last) == self.capacity:
                del young_last[next(iter(young_last))]
            young_last[mark] = None
        return tuple(sorted(young_last))

    def resume(self, edit_position: int) -> int:
        """The mark from which the prompt is continued when the token at `edit_position` has changed; 0 is the start."""
        return (0, *self.kept)[bisect_right(self.kept, edit_position)]

    def replay(self, edit_position: int) -> int:
        """Tokens prefilled again when the token at `edit_position` has changed.

        `edit_position = prompt_tokens` is the same prompt again.
        """
        return self.prompt_tokens - 1 - self.resume(edit_position)

    def floor(self, edit_position: int) -> int:
        """The least that `replay` can be: everything from the beginning of the edit's page on."""
        return self.prompt_tokens - 1 - page_floor(min(edit_position, self.prompt_tokens - 1))

    @property
    def worst_overhead(self) -> int:
        """The most unchanged tokens that one edit has prefilled again: those between the edit and the mark below it."""
        bounds = (0, *self.kept, self.prompt_tokens)
        return max(upper - lower for lower, upper in pairwise(bounds)) - 1


def plan(
    prompt_tokens: int,
    chunk_size: int,
    interval: int,
    interval_pp: int,
    *,
    checkpoint_bytes: int,
    budget_bytes: int,
    boundaries: Iterable[int] = (),
) -> CheckpointPlan:
    """The marks that exllamav3 1.6.4 and later, driven by our jobs, sets in a prompt.

    `Job.prefill` and `Job.is_checkpoint_boundary` of the engine, and `backends.exllamav3.jobs` where there are
    boundaries. Holds for a text prompt that is prefilled while no other job generates; beside one, chunks are shorter
    and marks can be denser. With an MTP drafter the engine does not resume from the mark just before the last token, of
    which it needs the hidden state.

    Args:
        prompt_tokens: length of the prompt.
        chunk_size: prefill chunk in tokens, at least one page.
        interval: in force for the last 2 x chunk_size tokens, as far as they lie past the last boundary.
        interval_pp: in force for the rest.
        checkpoint_bytes: host RAM of one checkpoint.
        budget_bytes: host RAM for all of them.
        boundaries: token positions in any order; see `boundary_pages`.

    Raises:
        ValueError: a size for which there is no plan.
    """
    if prompt_tokens < 1 or chunk_size < PAGE_TOKENS or checkpoint_bytes < 1:
        raise ValueError(
            f"prompt_tokens ({prompt_tokens}) and checkpoint_bytes ({checkpoint_bytes}) must be at least 1, "
            f"chunk_size ({chunk_size}) at least {PAGE_TOKENS}."
        )
    prefill_tokens = prompt_tokens - 1
    last_page_end = page_floor(prefill_tokens)
    tail = prefill_tokens - 2 * chunk_size
    anchors = boundary_pages(boundaries, prompt_tokens)
    last_anchor = anchors[-1] if anchors else 0
    # A chunk ends at each of these; the last full page of a prompt is always marked too.
    stops = sorted({*anchors, last_page_end} - {0})

    marks: list[int] = []
    position = previous = passes = 0
    for stop in stops:
        while position < stop:
            position = min(position + page_floor(chunk_size), stop)
            passes += 1
            distance = interval if position >= max(tail, last_anchor) else interval_pp
            if position == stop or position - previous >= distance:
                marks.append(position)
                previous = position
    # What follows the last full page is prefilled in a pass of its own.
    passes += prefill_tokens > last_page_end
    return CheckpointPlan(prompt_tokens, tuple(marks), anchors, passes, checkpoint_bytes, budget_bytes)


def boundary_pages(boundaries: Iterable[int], prompt_tokens: int) -> tuple[int, ...]:
    """Where a prompt gets marks for its boundaries: at the end of the last full page before each, ascending.

    One inside the first page gets none.
    """
    last_page_end = page_floor(prompt_tokens - 1)
    return tuple(sorted({min(page_floor(boundary), last_page_end) for boundary in boundaries} - {0}))


def plan_for(
    basis: PlanBasis,
    prompt_tokens: int,
    *,
    chunk_size: int | None = None,
    interval: int | None = None,
    interval_pp: int | None = None,
    boundaries: Sequence[int] = (),
    budget_mb: int | None = None,
) -> CheckpointPlan:
    """`plan` for a model, with what a user wants to be different.

    Args:
        basis: of the model.
        prompt_tokens: 1 to max_seq_len.
        chunk_size: rounded up to a multiple of 256, as the setting is. None, here and below: as the basis has it.
        interval: recurrent_checkpoint_interval, a multiple of 256.
        interval_pp: recurrent_checkpoint_interval_pp, a multiple of 256.
        boundaries: token positions in the prompt.
        budget_mb: memory.sysmem_recurrent_cache.

    Raises:
        InvalidRequest: a value outside these limits; `param` is the setting's name where there is one.
    """
    if not 1 <= prompt_tokens <= basis.max_seq_len:
        raise InvalidRequest(
            f"prompt_tokens is {prompt_tokens}; it should be 1 to {basis.max_seq_len}, the model's max_seq_len.",
            param="prompt_tokens",
        )
    if chunk_size is not None and chunk_size < 1:
        raise InvalidRequest(f"chunk_size is {chunk_size}; it should be at least 1.", param="chunk_size")
    for key, value in ((INTERVAL_KEY, interval), (INTERVAL_PP_KEY, interval_pp)):
        if value is not None and (value < 1 or value % PAGE_TOKENS):
            raise InvalidRequest(f"{key} is {value}; it should be a multiple of {PAGE_TOKENS} above 0.", param=key)
    for number, boundary in enumerate(boundaries):
        if not 0 <= boundary <= prompt_tokens:
            raise InvalidRequest(
                f"The boundary {boundary} lies outside the prompt of {prompt_tokens} tokens.",
                param=f"boundaries.{number}",
            )
    if budget_mb is not None and budget_mb < 0:
        raise InvalidRequest(f"{BUDGET_KEY} is {budget_mb}; it should be a number of MB, 0 or more.", param=BUDGET_KEY)
    return plan(
        prompt_tokens,
        basis.chunk_size if chunk_size is None else page_ceil(chunk_size),
        basis.interval if interval is None else interval,
        basis.interval_pp if interval_pp is None else interval_pp,
        checkpoint_bytes=basis.checkpoint_bytes,
        budget_bytes=basis.budget_bytes if budget_mb is None else budget_mb * MIB,
        boundaries=boundaries,
    )


def page_floor(tokens: int) -> int:
    """Rounded down to the end of a page."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def page_ceil(tokens: int) -> int:
    """Rounded up to the end of a page."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


# --- the model and its generator ------------------------------------------------------------------------------------


class RecurrentLayer(Protocol):
    def get_checkpoint_size(self) -> int: ...


class EngineCache(Protocol):
    def get_all_recurrent_layers(self) -> Mapping[Any, RecurrentLayer]: ...


class RecurrentCache(Protocol):
    max_size: int  # bytes


class EngineGenerator(Protocol):
    """What is read of exllamav3's `Generator` (of an `AsyncGenerator`: its `generator`)."""

    recurrent_checkpoint_interval: int
    recurrent_checkpoint_interval_pp: int
    recurrent_cache: RecurrentCache | None  # None: neither the model nor its drafter has recurrent layers
    target_recurrent: bool
    draft_recurrent: bool
    cache: EngineCache
    draft_cache: EngineCache | None


def checkpoint_info(generator: EngineGenerator) -> CheckpointInfo | None:
    """The intervals in force and the size of a checkpoint; None without recurrent layers."""
    if generator.recurrent_cache is None:
        return None
    caches = [generator.cache] if generator.target_recurrent else []
    if generator.draft_recurrent and generator.draft_cache is not None:
        caches.append(generator.draft_cache)
    size = checkpoint_bytes(caches)
    return CheckpointInfo(
        interval=generator.recurrent_checkpoint_interval,
        interval_pp=generator.recurrent_checkpoint_interval_pp,
        bytes=size,
        capacity=generator.recurrent_cache.max_size // size,
    )


def checkpoint_bytes(caches: Iterable[EngineCache]) -> int:
    """Host RAM of one checkpoint: the state of one sequence, of the model and its drafter together.

    The engine adds up the same layers when it makes a checkpoint (`PairedState.checkpoint_size`). They know their sizes
    before a weight is read.

    Args:
        caches: those of the models with recurrent layers.
    """
    return sum(layer.get_checkpoint_size() for cache in caches for layer in cache.get_all_recurrent_layers().values())


def describe(generator: EngineGenerator) -> str:
    """The line for the log about the intervals in force, read back from the generator."""
    return (
        f"Using recurrent checkpoint intervals: {generator.recurrent_checkpoint_interval} tokens in generated text and "
        f"at the end of a prompt, {generator.recurrent_checkpoint_interval_pp} tokens in the rest of a prompt."
    )


def describe_price(basis: PlanBasis) -> str:
    """The line for the log about what checkpoints take, and what an edit of a prompt can cost with them."""
    longest = plan_for(basis, basis.max_seq_len)
    return (
        f"A recurrent checkpoint takes {readable_bytes(basis.checkpoint_bytes)} of host RAM; memory.{BUDGET_KEY} "
        f"({basis.budget_bytes // MIB} MB) holds {longest.capacity:,}. In a prompt of {basis.max_seq_len:,} tokens an "
        f"edit can have {longest.worst_overhead:,} unchanged tokens processed again, on top of what follows it."
    )
