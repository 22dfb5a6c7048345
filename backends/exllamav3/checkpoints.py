"""Recurrent checkpoints: settings, advice, the plan for a prompt, and what a live generator holds.

A hybrid model's recurrent state cannot be rolled back, so the engine copies it to host RAM now and then while it reads
a prompt. A later prompt resumes from the last such *mark* that lies at or below the first token that differs.

Plain arithmetic: neither torch nor the engine is imported, so the server process can use it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from backends.messages import CheckpointInfo
from common.config_models import PAGE_TOKENS

DEFAULT_INTERVAL = 2048  # of a model that does not name another
DEFAULT_INTERVAL_PP = 32768

INTERVAL_KEY = "recurrent_checkpoint_interval"
INTERVAL_PP_KEY = "recurrent_checkpoint_interval_pp"


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
    recurrent: bool,
    chunk_size: int,
    cache_size: int,
    default_interval: int,
) -> list[str]:
    """Sentences for the log about settings that are valid but will not do what they seem to.

    Args:
        recurrent: whether the model has recurrent layers.
        chunk_size: prefill chunk in tokens.
        cache_size: key/value cache in tokens.
        default_interval: the model's default for the first interval.
    """
    arguments = intervals.engine_arguments()
    if arguments and not recurrent:
        verb = "has" if len(arguments) == 1 else "have"
        return [f"{' and '.join(arguments)} {verb} no effect: this model has no recurrent layers."]

    chosen: dict[int, list[str]] = {}  # value -> the keys that have it
    for key, value in arguments.items():
        chosen.setdefault(value, []).append(key)
    advice = []
    for value, keys in chosen.items():
        setting = f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} {value}"
        distance = _prompt_distance(value, chunk_size)
        if distance != value:
            advice.append(
                f"{setting}, but a prompt gets checkpoints only where a prefill chunk ends: with chunk_size "
                f"{chunk_size} they are {distance} tokens apart. Set chunk_size to {_exact_chunk(value, chunk_size)} "
                f"for checkpoints every {value} tokens."
            )
        if value >= cache_size:
            advice.append(
                f"{setting}, and the cache holds {cache_size} tokens: no prompt gets that far. "
                "Use less than cache_size."
            )
    if intervals.interval_pp is not None and intervals.interval is None:
        rest = _prompt_distance(intervals.interval_pp, chunk_size)
        if _prompt_distance(default_interval, chunk_size) > rest:
            advice.append(
                f"{INTERVAL_PP_KEY} is {intervals.interval_pp}, but {INTERVAL_KEY} is left at {default_interval}, "
                f"which applies to the last {2 * chunk_size} tokens of a prompt: checkpoints are missing there. "
                "Set both."
            )
    return advice


def _prompt_distance(interval: int, chunk_size: int) -> int:
    """Distance of marks in a long prompt: the first chunk end that is at least `interval` past the last mark."""
    step = _chunk_step(chunk_size)
    return -(-interval // step) * step


def _exact_chunk(interval: int, chunk_size: int) -> int:
    """The largest chunk, up to the present one, whose ends include every multiple of `interval`."""
    largest = min(chunk_size, interval) // PAGE_TOKENS * PAGE_TOKENS
    return next(chunk for chunk in range(largest, 0, -PAGE_TOKENS) if interval % chunk == 0)


def _chunk_step(chunk_size: int) -> int:
    return chunk_size // PAGE_TOKENS * PAGE_TOKENS


# --- the plan for one prompt ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointPlan:
    """Where a prompt, served alone and not cached before, gets its marks, and what an edit of it costs then.

    Positions are token indices from 0. The last token of a prompt is not part of prefill, so at most
    `prompt_tokens - 1` tokens are processed.

    Attributes:
        marks: positions of the marks set, ascending.
        checkpoint_bytes: host RAM of one.
        budget_bytes: host RAM for all; memory.sysmem_recurrent_cache.
    """

    prompt_tokens: int
    marks: tuple[int, ...]
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

    @property
    def kept(self) -> tuple[int, ...]:
        """The marks still there after the prompt: the engine drops the oldest when the budget is full."""
        return self.marks[max(0, len(self.marks) - self.capacity) :]

    def resume(self, edit_position: int) -> int:
        """The mark from which the prompt is continued when the token at `edit_position` has changed; 0 is the start."""
        return max((mark for mark in self.kept if mark <= edit_position), default=0)

    def replay(self, edit_position: int) -> int:
        """Tokens prefilled again when the token at `edit_position` has changed.

        `edit_position = prompt_tokens` is the same prompt again.
        """
        return self.prompt_tokens - 1 - self.resume(edit_position)

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
) -> CheckpointPlan:
    """The marks that exllamav3 1.6.4 and later sets in a prompt (`Job.prefill` and `Job.is_checkpoint_boundary`).

    Holds for a text prompt that is prefilled while no other job generates; beside one, chunks are shorter and marks
    can be denser.

    Args:
        prompt_tokens: length of the prompt.
        chunk_size: prefill chunk in tokens, at least one page.
        interval: in force for the last 2 x chunk_size tokens.
        interval_pp: in force for the rest.
        checkpoint_bytes: host RAM of one checkpoint.
        budget_bytes: host RAM for all of them.

    Raises:
        ValueError: a size for which there is no plan.
    """
    if prompt_tokens < 1 or chunk_size < PAGE_TOKENS or checkpoint_bytes < 1:
        raise ValueError(
            f"prompt_tokens ({prompt_tokens}) and checkpoint_bytes ({checkpoint_bytes}) must be at least 1, "
            f"chunk_size ({chunk_size}) at least {PAGE_TOKENS}."
        )
    prefill_tokens = prompt_tokens - 1
    last_page_end = prefill_tokens // PAGE_TOKENS * PAGE_TOKENS
    tail = prefill_tokens - 2 * chunk_size

    marks: list[int] = []
    position = previous = 0
    while position < last_page_end:
        position = min(position + _chunk_step(chunk_size), last_page_end)
        distance = interval if position >= tail else interval_pp
        # The last full page is always marked; what follows it is prefilled in a pass of its own.
        if position == last_page_end or position - previous >= distance:
            marks.append(position)
            previous = position
    return CheckpointPlan(prompt_tokens, tuple(marks), checkpoint_bytes, budget_bytes)


# --- a live generator -----------------------------------------------------------------------------------------------


class RecurrentLayer(Protocol):
    def get_checkpoint_size(self) -> int: ...


class EngineCache(Protocol):
    def get_all_recurrent_layers(self) -> Mapping[Any, RecurrentLayer]: ...


class RecurrentCache(Protocol):
    max_size: int  # bytes
    current_size: int  # bytes
    metrics: dict[str, int]

    def values(self) -> Iterable[Mapping[str, Any]]: ...


class EngineGenerator(Protocol):
    """What is read of exllamav3's `Generator` (of an `AsyncGenerator`: its `generator`)."""

    recurrent_checkpoint_interval: int
    recurrent_checkpoint_interval_pp: int
    recurrent_cache: RecurrentCache | None  # None: neither the model nor its drafter has recurrent layers
    target_recurrent: bool
    draft_recurrent: bool
    cache: EngineCache
    draft_cache: EngineCache | None


@dataclass(frozen=True)
class CheckpointState:
    """The checkpoints that a generator holds at this moment."""

    info: CheckpointInfo
    positions: tuple[int, ...]  # of all prompts, the next to be dropped first
    held_bytes: int
    evictions: int  # dropped because the budget was full, since the model was loaded
    evictions_usable: int  # of those, the ones that a prompt could still have resumed from
    pruned: int  # dropped while idle because nothing could resume from them any more


def observe(generator: EngineGenerator) -> CheckpointState | None:
    """Intervals in force, sizes, and the checkpoints held; None without recurrent layers."""
    held = generator.recurrent_cache
    if held is None:
        return None
    size = _checkpoint_bytes(generator)
    return CheckpointState(
        info=CheckpointInfo(
            interval=generator.recurrent_checkpoint_interval,
            interval_pp=generator.recurrent_checkpoint_interval_pp,
            bytes=size,
            capacity=held.max_size // size,
        ),
        positions=tuple(checkpoint["position"] for checkpoint in held.values()),
        held_bytes=held.current_size,
        evictions=held.metrics["stash_evictions"],
        evictions_usable=held.metrics["stash_evictions_live_kv"],
        pruned=held.metrics["stash_pruned"],
    )


def checkpoint_info(generator: EngineGenerator) -> CheckpointInfo | None:
    """The unchanging part of `observe`, known as soon as the model is loaded."""
    state = observe(generator)
    return None if state is None else state.info


def describe(generator: EngineGenerator) -> str:
    """The line for the log about the intervals in force, read back from the generator."""
    return (
        f"Using recurrent checkpoint intervals: {generator.recurrent_checkpoint_interval} tokens in generated text and "
        f"at the end of a prompt, {generator.recurrent_checkpoint_interval_pp} tokens in the rest of a prompt."
    )


def _checkpoint_bytes(generator: EngineGenerator) -> int:
    """Host RAM of one checkpoint: the state of one sequence, of the model and its drafter together.

    The engine adds up the same layers when it makes a checkpoint (`PairedState.checkpoint_size`); right after loading
    there is none to ask.
    """
    caches = [generator.cache] if generator.target_recurrent else []
    if generator.draft_recurrent and generator.draft_cache is not None:
        caches.append(generator.draft_cache)
    return sum(layer.get_checkpoint_size() for cache in caches for layer in cache.get_all_recurrent_layers().values())
