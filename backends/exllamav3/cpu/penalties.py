"""Penalties on tokens that occurred before: rep_pen.cu and dry.cu.

Logits come in fp32 or fp16 and leave in fp32. Ids that the vocabulary does not have, as those of images, do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_pres_freq_pens", "apply_rep_pens", "dry_penalty"]


def apply_rep_pens(
    in_logits: Tensor, out_logits: Tensor, past_ids: Tensor, rep_p: float, sustain_range: int, decay_range: int
) -> None:
    """Divide positive logits of tokens seen before by `rep_p`, and multiply negative ones (Keskar et al. 2019, "CTRL").

    Args:
        in_logits: (1, vocabulary).
        out_logits: out, alike, and may be the same.
        past_ids: (1, tokens) int64.
        sustain_range: the penalty holds in full for so many tokens back.
        decay_range: over so many tokens beyond, it fades to nothing.

    Raises:
        ValueError: there are several rows.
    """
    logits = in_logits.float().view(-1)
    ids, strength = _past(past_ids, sustain_range, decay_range, logits.numel())
    share = torch.zeros_like(logits).scatter_reduce_(0, ids, strength, "amax")
    penalised = torch.where(logits > 0, logits / rep_p, logits * rep_p)
    mixed = logits * (1.0 - share) + penalised * share
    # A share of exactly 0 or 1 must not multiply an infinity by 0.
    mixed = torch.where(share == 0, logits, torch.where(share == 1, penalised, mixed))
    out_logits.copy_(mixed.view(out_logits.shape))


def apply_pres_freq_pens(
    in_logits: Tensor,
    out_logits: Tensor,
    past_ids: Tensor,
    pres_p: float,
    freq_p: float,
    sustain_range: int,
    decay_range: int,
) -> None:
    """Subtract `freq_p` for every time a token was seen, and `pres_p` once, as OpenAI's API documents them.

    Otherwise as `apply_rep_pens`.
    """
    logits = in_logits.float().view(-1)
    ids, strength = _past(past_ids, sustain_range, decay_range, logits.numel())
    frequency = torch.zeros_like(logits).index_add_(0, ids, strength)
    presence = torch.zeros_like(logits).scatter_reduce_(0, ids, strength, "amax")
    out_logits.copy_((logits - frequency * freq_p - presence * pres_p).view(out_logits.shape))


def _past(past_ids: Tensor, sustain_range: int, decay_range: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The tokens in range, and how strongly each counts, from 0 to 1."""
    if len(past_ids) > 1:
        raise ValueError(f"Penalties are for one sequence at a time, not {len(past_ids)}.")
    ids = past_ids.view(-1)
    ids = ids[max(0, ids.numel() - sustain_range - decay_range) :]
    distance = torch.arange(ids.numel(), 0, -1).float()
    if decay_range > 0:
        strength = (1.0 - (distance - sustain_range) / decay_range).clamp(0.0, 1.0)
    else:
        strength = torch.ones_like(distance)
    valid = (ids >= 0) & (ids < vocabulary)
    return ids[valid], strength[valid]


def dry_penalty(
    in_logits: Tensor,
    out_logits: Tensor,
    past_ids: Tensor,
    breakers: Tensor | None,
    workspace: Tensor | None,
    counters: Tensor | None,
    multiplier: float,
    base: float,
    allowed_length: int,
    range: int,
    max_exponent: int,
    match_cap: int,
) -> None:
    """DRY (p-e-w, as in llama.cpp): penalise the token that would continue a repetition, more the longer it is.

    A token that once followed the last n tokens loses multiplier * base ** (n - allowed_length), for the largest such n
    of at least `allowed_length`.

    Args:
        in_logits: (batch, vocabulary).
        out_logits: out, alike, and may be the same.
        past_ids: (batch, tokens) int64.
        breakers: (vocabulary,) bool, tokens that end a repetition and are never penalised.
        workspace: scratch memory of a GPU's threads, like counters; not used.
        range: how many of the last tokens count; 0 or less for all.
        max_exponent: of `base`; 0 for no limit.
        match_cap: longest repetition that is looked for where there is no `max_exponent`.
    """
    out_logits.copy_(in_logits)
    cap = allowed_length + max_exponent if max_exponent > 0 else match_cap
    vocabulary = out_logits.shape[-1]
    for logits, past in zip(out_logits, past_ids, strict=True):
        recent = (past[-range:] if range > 0 else past).flip(0)
        known = (recent >= 0) & (recent < vocabulary)
        breaking = breakers[recent.where(known, 0)] & known if breakers is not None else torch.zeros_like(known)
        first = breaking.nonzero()[:1]
        limit = int(first) if first.numel() else len(recent)
        if limit < allowed_length or len(recent) <= allowed_length:
            continue
        lengths = torch.tensor(_repetitions(recent.tolist())[1:], dtype=torch.long).clamp(max=min(limit, cap))
        followers = recent[:-1]
        counted = (lengths >= allowed_length) & known[:-1] & ~breaking[:-1]
        longest = torch.full((vocabulary,), -1).scatter_reduce_(0, followers[counted], lengths[counted], "amax")
        exponents = (longest - allowed_length).double()
        if max_exponent > 0:
            exponents = exponents.clamp(max=max_exponent)
        penalties = (multiplier * torch.tensor(base, dtype=torch.double) ** exponents).float()
        logits -= penalties.where(longest >= 0, 0.0)


def _repetitions(recent: list[int]) -> list[int]:
    """From each index on, how many tokens are the same as from the start; 0 for the start itself.

    In linear time (the Z function; Gusfield 1997, "Algorithms on Strings, Trees and Sequences", section 1.4).
    """
    count = len(recent)
    lengths = [0] * count
    left = right = 0  # the stretch known to repeat the start that reaches furthest
    for index in range(1, count):
        end = min(right, index + lengths[index - left]) if index < right else index
        while end < count and recent[end - index] == recent[end]:
            end += 1
        if end > right:
            left, right = index, end
        lengths[index] = end - index
    return lengths
