"""What an engine keeps of prompts, and what it says about that: plain records, for both sides of the pipe.

Positions and counts are tokens. A model without recurrent layers goes on from the end of the keys and values that are
cached; one with recurrent layers from the last checkpoint at or below it, and replays what lies between.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

TierName: TypeAlias = Literal["vram", "ram", "disk"]

# The owner of requests that may be compared with everybody's prompts: those of an administrator.
EVERYBODY = ""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of keys and values in one place."""

    tier: TierName
    capacity_tokens: int
    capacity_bytes: int
    used_tokens: int  # in complete pages that a prompt could be resumed with
    used_bytes: int
    active_tokens: int  # in pages that running requests hold; 0 but for vram
    hit_tokens: int  # served from here instead of being processed, since the model was loaded
    evicted_tokens: int  # of complete pages dropped to make room, since the model was loaded


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the recurrent state after so many tokens of some prompt."""

    position: int
    bytes: int
    age_seconds: float | None  # since it was made; None for one from disk that this process has not made
    tier: Literal["ram", "disk"]
    usable: bool  # false: pages before it are gone, so that no prompt can be resumed from it
    boundary: bool  # put where a system prompt or a message ends, see GenerationRequest.cache_boundaries


class CheckpointsState(msgspec.Struct, frozen=True, kw_only=True):
    capacity_bytes: int  # memory.sysmem_recurrent_cache
    used_bytes: int
    checkpoint_bytes: int  # one
    capacity: int  # how many fit
    hits: int  # prompts resumed from one, since the model was loaded; so are the next four
    replayed_tokens: int  # cached as keys and values, but past the last checkpoint
    evictions: int  # dropped because the budget was full
    evictions_usable: int  # of those, the ones that a prompt could still have been resumed from
    pruned: int  # dropped while idle because nothing could be resumed from them any more
    entries: list[Checkpoint]  # the next to be dropped first


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model's engine holds at this moment."""

    tiers: list[TierState]  # vram, and those of the others that are there
    checkpoints: CheckpointsState | None  # None: the model has no recurrent layers
    active_requests: int
    queued_requests: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token at which a prompt differs from the nearest earlier one that its owner may see."""

    position: int
    cached: str  # some text from there on, of the earlier prompt
    requested: str  # and of this one
    before: str  # what stands before it in both


class CacheExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt an engine would not process, or has not processed, and why not more."""

    prompt_tokens: int
    matched_tokens: int  # from the beginning, whose keys and values are cached
    resumed_tokens: int  # from which the prompt is gone on from: up to the last usable checkpoint, or matched_tokens
    processed_tokens: int  # prompt_tokens less resumed_tokens
    replayed_tokens: int  # matched_tokens less resumed_tokens: processed again for want of a checkpoint
    ram_tokens: int  # of resumed_tokens, those that come from the page tier in host RAM
    disk_tokens: int
    difference: Difference | None  # None: no earlier prompt, or one that goes on just so
    reason: str  # a sentence


class CacheChange(msgspec.Struct, frozen=True, kw_only=True):
    """What was written to disk, or dropped."""

    pages: int
    checkpoints: int


class PlanBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What recurrent checkpoints of a model cost and where they fall; known before a weight is read."""

    chunk_size: int
    max_seq_len: int
    cache_size: int
    interval: int  # in force in generated text and past the last boundary in the last 2 x chunk_size of a prompt
    interval_pp: int  # in the rest of a prompt
    checkpoint_bytes: int
    budget_bytes: int
