"""`recurrent_checkpoint_target`: from what an edit may cost to the intervals and the chunk size that keep to it.

Plain arithmetic, as in `backends.exllamav3.checkpoints`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from backends.exllamav3.checkpoints import (
    BUDGET_KEY,
    CHUNK_KEY,
    MIB,
    TARGET_KEY,
    CheckpointIntervals,
    page_ceil,
    page_floor,
    plan_for,
    readable_bytes,
)
from common.caching import PlanBasis
from common.config_models import PAGE_TOKENS


@dataclass(frozen=True)
class Choice:
    """What was chosen for a target.

    Attributes:
        basis: the model's, with the chosen chunk size and intervals.
        met: whether the budget allows what was asked for.
        reason: for the log.
    """

    basis: PlanBasis
    met: bool
    reason: str

    @property
    def intervals(self) -> CheckpointIntervals:
        return CheckpointIntervals(self.basis.interval, self.basis.interval_pp)


def in_seconds(target: int | str) -> bool:
    """Whether a target needs the measured speed of prefill."""
    return isinstance(target, str)


def choose(
    target: int | str,
    basis: PlanBasis,
    explicit: CheckpointIntervals,
    *,
    tokens_per_second: float | None = None,
) -> Choice:
    """Checkpoints just dense enough for a target.

    `worst_overhead` of the plan of any prompt up to max_seq_len is then at most the target, if the budget can hold the
    checkpoints that a prompt as long as that needs for it. If it cannot, they get the least distance with which it can.
    The chunk size is lowered only as far as the target asks for, since small chunks cost speed. An interval that is set
    stays as it is, and takes the promise with it.

    Args:
        target: tokens, at least a page, or seconds such as "3s".
        basis: of the model, without regard to the target: with the explicit intervals, or the engine's defaults.
        explicit: the intervals that the user has set.
        tokens_per_second: the measured speed of prefill, for a target in seconds.
    """
    tokens, asked = _in_tokens(target, tokens_per_second)
    capacity = basis.budget_bytes // basis.checkpoint_bytes
    if capacity == 0:
        # What to do about that is said whether there is a target or not, see `advise`.
        return Choice(basis, met=False, reason=f"{asked}, but no checkpoint fits: the intervals stay as they are.")

    reach = max(page_floor(basis.max_seq_len - 1), PAGE_TOKENS)  # the last checkpoint of the longest prompt
    # An edit just before a checkpoint costs the distance to the one below it, less one token.
    largest = min(page_floor(tokens + 1), _ceil(reach, basis.chunk_size))
    smallest = page_ceil(-(-reach // capacity))
    met = smallest <= largest
    chunk_size = _chunk_size(basis.chunk_size, smallest, largest) if met else min(basis.chunk_size, smallest)
    # Checkpoints fall on the ends of chunks.
    distance = largest // chunk_size * chunk_size if met else _ceil(smallest, chunk_size)
    # Where there is room, answers and the ends of prompts keep the checkpoints that the engine gives them anyway.
    usual = min(distance, basis.interval)
    room = distance >= reach or reach // distance + 2 * chunk_size // usual + 2 <= capacity
    chosen = msgspec.structs.replace(
        basis,
        chunk_size=chunk_size,
        interval=explicit.interval or (usual if room else distance),
        interval_pp=explicit.interval_pp or distance,
    )
    reason = f"{asked}: {_outcome(chosen, basis.chunk_size)}"
    if not met:
        needed = _ceil(-(-reach // largest) * basis.checkpoint_bytes, MIB) // MIB
        reason += (
            f" memory.{BUDGET_KEY} ({basis.budget_bytes // MIB} MB) has no room for more; the target needs {needed} MB."
        )
    return Choice(chosen, met=met, reason=reason)


def _chunk_size(given: int, smallest: int, largest: int) -> int:
    """The largest chunk up to the given one with a multiple between these two distances, both ends of pages."""
    sizes = range(min(given, largest), 0, -PAGE_TOKENS)
    return next(size for size in sizes if largest // size * size >= smallest)


def _in_tokens(target: int | str, tokens_per_second: float | None) -> tuple[int, str]:
    """The target in tokens, and what was asked for in words."""
    if isinstance(target, int):
        return target, f"{TARGET_KEY} is {target}"
    assert tokens_per_second is not None, "a target in seconds needs the measured speed"
    # Less than a page would be no denser than a page.
    tokens = max(PAGE_TOKENS, int(float(target.removesuffix("s")) * tokens_per_second))
    return tokens, f"{TARGET_KEY} is {target}, {tokens:,} tokens at the measured {tokens_per_second:,.0f} tokens/s"


def _outcome(chosen: PlanBasis, given_chunk_size: int) -> str:
    longest = plan_for(chosen, chosen.max_seq_len)
    distances = f"every {chosen.interval_pp:,} tokens"
    if chosen.interval != chosen.interval_pp:
        distances += f" of a prompt, every {chosen.interval:,} at its end and in answers"
    chunk = f"{CHUNK_KEY} {chosen.chunk_size:,}"
    if chosen.chunk_size != given_chunk_size:
        chunk += f" instead of {given_chunk_size:,}"
    return (
        f"checkpoints {distances}, with {chunk}. A prompt of {chosen.max_seq_len:,} tokens has {len(longest.marks):,} "
        f"of them ({readable_bytes(longest.bytes)}); an edit has at most {longest.worst_overhead:,} unchanged tokens "
        "processed again."
    )


def _ceil(count: int, step: int) -> int:
    return -(-count // step) * step
