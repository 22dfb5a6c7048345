"""Penalties on tokens that occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_pres_freq_pens", "apply_rep_pens", "dry_penalty"]


def apply_rep_pens(
    in_logits: Tensor, out_logits: Tensor, past_ids: Tensor, rep_p: float, sustain_range: int, decay_range: int
) -> None:
    """Divide positive logits of tokens seen before by `rep_p`, and multiply negative ones.

    Args:
        in_logits: (1, vocabulary); out_logits, in fp32, alike and may be the same.
        past_ids: (1, tokens).
        sustain_range: the penalty holds in full for so many tokens back.
        decay_range: over so many tokens beyond, it fades to nothing.
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
    """Subtract `freq_p` for every time a token was seen, and `pres_p` once. Otherwise as `apply_rep_pens`."""
    logits = in_logits.float().view(-1)
    ids, strength = _past(past_ids, sustain_range, decay_range, logits.numel())
    frequency = torch.zeros_like(logits).index_add_(0, ids, strength)
    presence = torch.zeros_like(logits).scatter_reduce_(0, ids, strength, "amax")
    out_logits.copy_((logits - frequency * freq_p - presence * pres_p).view(out_logits.shape))


def _past(past_ids: Tensor, sustain_range: int, decay_range: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The tokens in range, and how strongly each counts, from 0 to 1."""
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
    """DRY: penalise the token that would continue a repetition, more the longer it is.

    A token that once followed the last n tokens loses multiplier * base ** (n - allowed_length), for the largest such n
    of at least `allowed_length`.

    Args:
        in_logits: (batch, vocabulary); out_logits, in fp32, alike.
        past_ids: (batch, tokens).
        breakers: (vocabulary,) tokens that end a repetition and are never penalised.
        range: how many of the last tokens count; 0 for all.
        max_exponent: of `base`; 0 for no limit.
        match_cap: longest repetition that is looked for where there is no `max_exponent`.
    """
    out_logits.copy_(in_logits)
    cap = allowed_length + max_exponent if max_exponent > 0 else match_cap
    breaking = set(breakers.nonzero().view(-1).tolist()) if breakers is not None else set()
    for row, logits in enumerate(out_logits):
        window = past_ids[row].tolist()
        window = window[-range:] if range > 0 else window
        for token, length in _repetitions(window[::-1], breaking, allowed_length, cap).items():
            if 0 <= token < len(logits) and token not in breaking:
                exponent = length - allowed_length
                if max_exponent > 0:
                    exponent = min(exponent, max_exponent)
                logits[token] -= _penalty(multiplier, base, exponent)


def _repetitions(recent: list[int], breaking: set[int], shortest: int, cap: int) -> dict[int, int]:
    """For each token that once followed the latest ones, how many of these it followed; `recent` runs backwards."""
    limit = next((age for age, token in enumerate(recent) if token in breaking), len(recent))
    if limit < shortest or len(recent) <= shortest:
        return {}
    limit = min(limit, cap)
    longest: dict[int, int] = {}
    for age in range(1, len(recent)):
        length = 0
        while length < min(limit, len(recent) - age) and recent[length] == recent[age + length]:
            length += 1
        if length >= shortest:
            follower = recent[age - 1]
            longest[follower] = max(length, longest.get(follower, 0))
    return longest


def _penalty(multiplier: float, base: float, exponent: int) -> float:
    try:
        return float(multiplier * base**exponent)
    except OverflowError:
        return float("inf")
