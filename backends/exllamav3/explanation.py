"""Why so much of a prompt is cached, and not more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from backends.exllamav3.cache_lookup import Lookup, leading_pages, page_in_vram, usable_hashes
from backends.exllamav3.checkpoints import INTERVAL_KEY, INTERVAL_PP_KEY, checkpoint_info, page_floor
from backends.exllamav3.engine import Generator, Tensor
from backends.exllamav3.jobs import CheckpointLedger
from backends.exllamav3.prompt_history import Nearest, PromptHistory
from common.caching import EVERYBODY, CacheExplanation, Difference
from common.config_models import PAGE_TOKENS

TokensToText: TypeAlias = Callable[[list[int]], str]
Relation: TypeAlias = Literal["unknown", "repeats", "goes on", "differs"]

# Text around a difference: so many characters, of so many tokens at most.
CHARACTERS_AROUND = 60
TOKENS_AROUND = 32


def explain(
    generator: Generator,
    ids: Tensor,
    found: Lookup,
    *,
    history: PromptHistory,
    ledger: CheckpointLedger,
    owner: str,
    decode: TokensToText,
    healed: bool = False,
) -> CacheExplanation:
    """What a job with this prompt would find if the engine took it now, beside the earlier prompts of its owner.

    Args:
        ids: (1, tokens).
        found: of these, at this moment.
        ledger: of the generator's checkpoints.
        decode: token ids to text, control tokens included.
        healed: whether the last token is sampled again.
    """
    tokens: list[int] = ids.flatten().tolist()
    served = ids[:, :-1] if healed else ids
    nearest = history.nearest(owner, tokens)
    case = _case(generator, served, found, nearest, ledger, owner)
    differs = nearest is not None and case.relation == "differs" and not case.foreign
    return CacheExplanation(
        prompt_tokens=len(tokens),
        matched_tokens=found.matched,
        resumed_tokens=found.resumed,
        processed_tokens=len(tokens) - found.resumed,
        replayed_tokens=found.matched - found.resumed,
        ram_tokens=found.ram,
        disk_tokens=found.disk,
        difference=_difference(tokens, nearest, decode) if nearest is not None and differs else None,
        reason="; ".join([_compared(case), *_cached(case), *_replayed(case)]) + ".",
    )


def _difference(tokens: list[int], nearest: Nearest, decode: TokensToText) -> Difference:
    position = nearest.common
    after = slice(position, position + TOKENS_AROUND)
    return Difference(
        position=position,
        before=decode(tokens[max(0, position - TOKENS_AROUND) : position])[-CHARACTERS_AROUND:],
        cached=decode(nearest.ids[after].tolist())[:CHARACTERS_AROUND],
        requested=decode(tokens[after])[:CHARACTERS_AROUND],
    )


# --- what is known ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A prompt, its nearest earlier one, and what is cached of it; positions in tokens.

    Attributes:
        usable: end of the last page that a cache can serve.
        leading: end of the complete pages from the beginning, in any tier.
        common: the first so many tokens are those of the nearest earlier prompt; 0 without one.
        relation: how the prompt goes on after these.
        all_seen: everybody's prompts are compared, not only those of one key.
        being_filled: another request is processing the page after `leading`.
        recurrent: the model has recurrent layers.
        unreachable: more is in the tier in host RAM than can be brought back: what makes room for it in VRAM pushes
            some of it out.
        none_fits: the budget is smaller than one checkpoint.
        dropped: last position past `found.resumed` at which a checkpoint was made and dropped, as far as is known.
    """

    found: Lookup
    usable: int
    leading: int
    common: int
    relation: Relation
    all_seen: bool
    being_filled: bool
    recurrent: bool
    unreachable: bool
    none_fits: bool = False
    dropped: int | None = None

    @property
    def foreign(self) -> bool:
        """More is cached than the nearest earlier prompt explains."""
        return self.leading > self.common

    @property
    def lost(self) -> bool:
        """Less is cached than when the nearest earlier prompt had been served."""
        if self.leading < min(page_floor(self.common), self.usable):
            return True
        # Without recurrent layers, the beginning of a page is of use as well, from the second token on.
        return not self.recurrent and not self.found.matched and self.common > 1


def _case(
    generator: Generator, served: Tensor, found: Lookup, nearest: Nearest | None, ledger: CheckpointLedger, owner: str
) -> _Case:
    hashes = usable_hashes(generator, served)
    leading = leading_pages(generator, hashes)
    next_page = page_in_vram(generator, hashes[leading]) if leading < len(hashes) else None
    case = _Case(
        found=found,
        usable=len(hashes) * PAGE_TOKENS,
        leading=leading * PAGE_TOKENS,
        common=0 if nearest is None else nearest.common,
        relation=_relation(served, nearest),
        all_seen=owner == EVERYBODY,
        being_filled=next_page is not None and next_page.ref_count > 0,
        recurrent=generator.recurrent_cache is not None,
        unreachable=found.matched < leading * PAGE_TOKENS,
    )
    info = checkpoint_info(generator)
    if info is None:
        return case
    pages = range(found.resumed // PAGE_TOKENS, leading)  # whose ends lie past the point of resuming
    held = [page for page in pages if generator.recurrent_cache.has(hashes[page])]
    dropped = [page for page in pages if page not in held and ledger.of(hashes[page]) is not None]
    return replace(
        case,
        unreachable=bool(held),
        none_fits=info.capacity == 0,
        dropped=(dropped[-1] + 1) * PAGE_TOKENS if dropped else None,
    )


def _relation(served: Tensor, nearest: Nearest | None) -> Relation:
    if nearest is None:
        return "unknown"
    if nearest.common >= served.shape[-1]:
        return "repeats"
    return "goes on" if nearest.common == len(nearest.ids) else "differs"


# --- and what is said of it -------------------------------------------------------------------------------------------


def _compared(case: _Case) -> str:
    match case.relation:
        case "unknown":
            return "No earlier prompt that is still known begins like this one"
        case "repeats":
            return "All of this prompt was served before"
        case "goes on":
            return f"This prompt goes on from an earlier one of {case.common:,} tokens"
        case "differs":
            return f"This prompt differs from the nearest earlier one at token {case.common:,}"


def _cached(case: _Case) -> Iterator[str]:
    cached = case.leading if case.recurrent else case.found.matched
    if case.foreign:
        whose = "one" if case.all_seen else "a prompt of another key, or one"
        yield f"its first {cached:,} tokens are cached all the same, from {whose} that still runs or is no longer known"
    elif cached:
        yield f"its first {cached:,} tokens are cached"
    elif case.recurrent and not case.usable:
        yield f"only full pages of {PAGE_TOKENS} tokens before the last token are kept, and this prompt has none"
    elif case.recurrent and case.common and not case.lost:
        yield f"only full pages of {PAGE_TOKENS} tokens are kept, and the two do not share one"
    if case.lost and case.being_filled:
        yield f"from token {case.leading:,} on, another request is processing the same tokens at this moment"
    elif case.lost:
        yield (
            f"what was cached from token {case.leading:,} on was dropped to make room, which a larger cache_size or "
            "memory.sysmem_kv_cache prevents"
        )


def _replayed(case: _Case) -> Iterator[str]:
    if case.recurrent and case.found.resumed < case.leading:
        place = f"the last usable checkpoint is at {case.found.resumed:,}"
        if not case.found.resumed:
            place = "there is no usable checkpoint"
        yield f"{place}, so {case.leading - case.found.resumed:,} of these are processed again"
        yield _remedy(case)
    elif case.unreachable:
        yield "more cannot be brought back through memory.sysmem_kv_cache at once, so a larger one helps"


def _remedy(case: _Case) -> str:
    if case.none_fits:
        return "memory.sysmem_recurrent_cache is too small for even one"
    if case.unreachable:
        return (
            "the pages up to a later one cannot all be brought back through memory.sysmem_kv_cache, so a larger one "
            "helps"
        )
    if case.dropped is not None:
        return (
            f"one at {case.dropped:,} was dropped to make room, which a larger memory.sysmem_recurrent_cache prevents"
        )
    return f"a smaller {INTERVAL_KEY} or {INTERVAL_PP_KEY}, or one of cache_boundaries there, puts one nearer"
