"""What the server says about its prompt cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from backends.exllamav3.checkpoints import CheckpointPlan, plan_for
from common import caching
from common.boundaries import MAX_BOUNDARIES
from common.caching import PlanBasis, TierName
from common.config_models import PAGE_TOKENS
from common.sampling import NonNegative, RequestModel


class _Record(BaseModel):
    """Has the fields of the record of its name in `common.caching`, or some of them."""

    model_config = ConfigDict(from_attributes=True)


# --- what is cached -----------------------------------------------------------------------------------------------


class CacheTier(_Record):
    tier: TierName = Field(description="vram (host RAM where there is no GPU), and ram and disk where they are set up.")
    capacity_tokens: int = Field(description="Tokens whose keys and values fit.")
    capacity_bytes: int
    used_tokens: int = Field(description="Tokens in complete pages, which a prompt can be resumed with.")
    used_bytes: int
    active_tokens: int = Field(description="Tokens in pages that running requests hold; of vram.")
    hit_tokens: int = Field(description="Tokens served from here instead of being processed, since the load.")
    evicted_tokens: int = Field(description="Tokens dropped to make room, since the load.")


class CachedCheckpoint(_Record):
    position: int = Field(description="Tokens from the beginning of its prompt.")
    bytes: int
    age_seconds: float | None = Field(description="Since it was made; null for one from an earlier run of the server.")
    tier: Literal["ram", "disk"]
    usable: bool = Field(description="false: pages before it are gone, so that no prompt can be resumed from it.")
    boundary: bool = Field(description="Put where a system prompt or a message ends.")


class Checkpoints(_Record):
    """Copies of the recurrent state, in host RAM. Counts are since the model was loaded."""

    capacity_bytes: int = Field(description="memory.sysmem_recurrent_cache, in bytes.")
    used_bytes: int
    checkpoint_bytes: int = Field(description="One.")
    capacity: int = Field(description="How many fit.")
    held: int = Field(description="How many there are, on disk included.")
    usable: int = Field(description="Of these, those that a prompt can be resumed from.")
    hits: int = Field(description="Prompts that were resumed from one.")
    replayed_tokens: int = Field(description="Tokens processed again although their keys and values were cached.")
    evictions: int = Field(description="Dropped because the budget was full.")
    evictions_usable: int = Field(description="Of these, those that a prompt could still have been resumed from.")
    pruned: int = Field(description="Dropped while idle because no prompt could be resumed from them any more.")
    entries: list[CachedCheckpoint] | None = Field(
        description="Each one, the next to be dropped first. null without the admin key."
    )

    @classmethod
    def of(cls, state: caching.CheckpointsState, *, with_entries: bool) -> Self:
        entries = [CachedCheckpoint.model_validate(entry) for entry in state.entries]
        usable = sum(entry.usable for entry in entries)
        counts = {name: getattr(state, name) for name in state.__struct_fields__ if name != "entries"}
        return cls(**counts, held=len(entries), usable=usable, entries=entries if with_entries else None)


class CacheReport(BaseModel):
    """What the loaded model's engine has cached at this moment."""

    model: str
    tiers: list[CacheTier]
    checkpoints: Checkpoints | None = Field(description="null: the model has no recurrent layers.")
    active_requests: int
    queued_requests: int

    @classmethod
    def of(cls, model: str, state: caching.CacheState, *, with_entries: bool) -> Self:
        checkpoints = state.checkpoints
        return cls(
            model=model,
            tiers=[CacheTier.model_validate(tier) for tier in state.tiers],
            checkpoints=None if checkpoints is None else Checkpoints.of(checkpoints, with_entries=with_entries),
            active_requests=state.active_requests,
            queued_requests=state.queued_requests,
        )


class CacheChange(_Record):
    """What was written to disk, or dropped."""

    pages: int = Field(description="Of 256 tokens.")
    checkpoints: int


# --- what a prompt finds ------------------------------------------------------------------------------------------


class CacheDifference(_Record):
    position: int = Field(description="Tokens that both begin with.")
    before: str = Field(description="Some text that stands before it in both.")
    cached: str = Field(description="Some text from there on, of the earlier prompt.")
    requested: str = Field(description="And of this one.")


class CacheExplanation(_Record):
    """How much of a prompt is cached, and why not more. Counts are tokens."""

    prompt_tokens: int = Field(description="Of the prompt.")
    matched_tokens: int = Field(description="From its beginning, whose keys and values are cached.")
    resumed_tokens: int = Field(
        description="That are not processed again: all that match, or those up to the last usable checkpoint in them."
    )
    processed_tokens: int = Field(description="The rest of the prompt.")
    replayed_tokens: int = Field(description="That match and are processed again, for want of a checkpoint.")
    ram_tokens: int = Field(description="Of resumed_tokens, those that come from the page tier in host RAM.")
    disk_tokens: int = Field(description="Of resumed_tokens, those that come from disk.")
    difference: CacheDifference | None = Field(
        description="The first token that is not as in the nearest earlier prompt of the same key, or of any key for "
        "an administrator. null: there is none."
    )
    reason: str = Field(description="In words.")

    @classmethod
    def of(cls, explanation: caching.CacheExplanation | None) -> Self | None:
        return None if explanation is None else cls.model_validate(explanation)


# --- what checkpoints cost ----------------------------------------------------------------------------------------


def _listed(values: object) -> object:
    """`512,3800` is the same as the parameter twice."""
    if not isinstance(values, list):
        return values
    return [item.strip() for value in values for item in (value.split(",") if isinstance(value, str) else [value])]


_Pages: TypeAlias = Annotated[int, Field(gt=0, multiple_of=PAGE_TOKENS)]
_Positions: TypeAlias = Annotated[list[NonNegative], BeforeValidator(_listed), Field(max_length=MAX_BOUNDARIES)]


class CachePlanQuery(RequestModel):
    """Which prompt, and what of the settings is to be different. The names are theirs."""

    prompt_tokens: Annotated[int, Field(ge=1, description="Length of the prompt.")]
    model: str | None = Field(None, description="Default: the loaded model. Any other one needs the admin key.")
    chunk_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Default, here and below: as the model is loaded."
    )
    recurrent_checkpoint_interval: _Pages | None = None
    recurrent_checkpoint_interval_pp: _Pages | None = None
    sysmem_recurrent_cache: NonNegative | None = Field(None, description="MB for checkpoints.")
    boundaries: _Positions = Field(
        [], description="Tokens from the beginning at which the system prompt or a message ends, as in 512,3800."
    )
    format: Literal["json", "png"] | None = Field(
        None, description="Default: json, or png where the header Accept begins with image/png."
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value not in ("", [""])}
        return values

    def plan(self, basis: PlanBasis) -> CheckpointPlan:
        """Raises `InvalidRequest` for what does not fit the model."""
        return plan_for(
            basis,
            self.prompt_tokens,
            chunk_size=self.chunk_size,
            interval=self.recurrent_checkpoint_interval,
            interval_pp=self.recurrent_checkpoint_interval_pp,
            boundaries=self.boundaries,
            budget_mb=self.sysmem_recurrent_cache,
        )


class ReplayStep(BaseModel):
    """What an edit of any of these tokens costs."""

    edit_from: int = Field(description="The first token, counted from 0.")
    edit_to: int = Field(description="The last.")
    resumed_tokens: int = Field(description="The checkpoint that the prompt is resumed from; 0: its beginning.")
    prefilled_tokens: int = Field(description="Processed again. The last token of a prompt is not part of prefill.")


class CachePlan(BaseModel):
    """Checkpoints of a prompt that is not cached and is processed alone. Positions and counts are tokens."""

    model: str
    recurrent: bool = Field(description="false: there are no checkpoints, and an edit costs what follows it.")
    prompt_tokens: int
    marks: list[int] = Field(default=[], description="Where checkpoints are made.")
    anchors: list[int] = Field(default=[], description="Of the marks, those at boundaries.")
    kept: list[int] = Field(default=[], description="Of the marks, those that fit and are there in the end.")
    checkpoint_bytes: int = Field(default=0, description="One, in host RAM.")
    bytes: int = Field(default=0, description="All marks together, whether they fit or not.")
    budget_bytes: int = Field(default=0, description="memory.sysmem_recurrent_cache, in bytes.")
    capacity: int = Field(default=0, description="How many fit.")
    passes: int | None = Field(default=None, description="Forward passes of the prefill. null: not known.")
    worst_overhead: int = Field(default=0, description="The most unchanged tokens that one edit has processed again.")
    replay: list[ReplayStep] = Field(default=[], description="The cost of an edit, by its place.")

    @classmethod
    def of(cls, model: str, plan: CheckpointPlan) -> Self:
        return cls(
            model=model,
            recurrent=True,
            prompt_tokens=plan.prompt_tokens,
            marks=list(plan.marks),
            anchors=list(plan.anchors),
            kept=list(plan.kept),
            checkpoint_bytes=plan.checkpoint_bytes,
            bytes=plan.bytes,
            budget_bytes=plan.budget_bytes,
            capacity=plan.capacity,
            passes=plan.passes,
            worst_overhead=plan.worst_overhead,
            replay=list(_steps(plan)),
        )


def _steps(plan: CheckpointPlan) -> Iterable[ReplayStep]:
    for mark, following in pairwise((0, *plan.kept, plan.prompt_tokens)):
        yield ReplayStep(edit_from=mark, edit_to=following - 1, resumed_tokens=mark, prefilled_tokens=plan.replay(mark))
