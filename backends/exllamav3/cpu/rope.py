"""Rotary position embedding (Su et al. 2021, "RoFormer"), with the norm of heads that the engine fuses into it.

The formulas are those of `rope_kernel` in rope.cu; all arithmetic is fp32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from backends.exllamav3.cpu.norms import rms_norm

__all__ = ["gen_mrope_pos_ids", "rope"]

# Values of the engine's `RopeStyle`.
GPTJ = 1  # pairs of neighbours
NEOX = 2  # pairs across the halves

TEXT = -1  # instead of an image's number


def rope(
    q: Tensor,
    out_q: Tensor,
    k: Tensor | None,
    out_k: Tensor | None,
    inv_freq: Tensor,
    position: int,
    positions: Tensor | None,
    position_ids: Tensor | None,
    rope_mode: int,
    attn_factor: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_constant_bias: float,
    l4_beta: float,
    l4_original: int,
    rotate_dims: int,
    rotate_offset: int,
) -> None:
    """Normalise heads where there is a weight, then rotate.

    A pair (a, b) becomes (a cos t - b sin t, b cos t + a sin t), t being its frequency times the position.

    Args:
        q: (batch, tokens, heads, head_dim) of any float type; k alike, with heads of its own.
        out_q: out, as q, and may be q; out_k alike.
        inv_freq: fp32 frequencies (pairs,), or angles (positions, pairs), the same for all rows or with one
            table each before.
        position: of the first token, where the next two are None.
        positions: (batch,) position of each row's first token.
        position_ids: (batch, tokens) or (batch, tokens, rotate_dims) position of every token; used without `positions`.
        rope_mode: the pairs are neighbours (1), or lie across the halves (2).
        attn_factor: scale of cosine and sine.
        q_norm: (head_dim,) weight of the queries' RMS norm, see `norms.rms_norm`; k_norm alike.
        l4_beta: above 0, queries are scaled by 1 + beta ln(1 + floor(position / l4_original)) (Llama 4).
        rotate_dims: how many position dimensions take turns along the head, each its own segment.
        rotate_offset: first element of the head that is rotated.

    Raises:
        NotImplementedError: another `rope_mode`.
    """
    batch, tokens = q.shape[:2]
    if inv_freq.dim() == 1 and rotate_dims == 1 and (positions is not None or position_ids is None) and l4_beta <= 0.0:
        starts = (position,) if positions is None else tuple(positions.view(-1).tolist())
        rotations, query_scale = [_running(_frequencies(inv_freq), starts, tokens, attn_factor, rope_mode)], None
    else:
        where = _positions(batch, tokens, position, positions, position_ids)
        tables = (_rotation(_dimension(where, dim), inv_freq) for dim in range(rotate_dims))
        rotations = [_factors(angles, attn_factor, rope_mode) for angles in tables]
        query_scale = _llama4_scale(_dimension(where, 0), l4_beta, l4_original)

    heads = [(q, out_q, q_norm, query_scale)]
    if k is not None and out_k is not None:
        heads.append((k, out_k, k_norm, None))
    for source, target, norm, scale in heads:
        x = target if target.dtype == torch.float else torch.empty(target.shape)
        if norm is not None:
            rms_norm(source, norm, x, norm_eps, norm_constant_bias, 1.0, span_heads=False, add_residual=False)
        elif x is not source:
            x.copy_(source)
        start = rotate_offset
        for cos, sin in rotations:
            width = cos.shape[-1]
            _rotate_(x if width == x.shape[-1] else x[..., start : start + width], cos, sin, rope_mode)
            start += width
        if scale is not None:
            x *= scale
        if x is not target:
            target.copy_(x)


def gen_mrope_pos_ids(
    mrope_pos_ids: Tensor,
    ids: Tensor,
    merge_size: int,
    spans: list[tuple[int, int]],
    grids: list[tuple[int, int, int]],
) -> int:
    """Positions of a prompt's tokens in time, height and width (Qwen2-VL).

    All three of a token of text are one more than the largest before it. Those of an image's go along its grid from
    there on.

    Args:
        mrope_pos_ids: out, (3, positions) int64; past the ids they go on as for text.
        ids: (tokens,) int64.
        merge_size: patches of a grid that make one token, along each edge.
        spans: ids [first, end) of each image.
        grids: patches of each image in time, height and width.

    Returns:
        The position after the ids.
    """
    owners = torch.full((mrope_pos_ids.shape[1],), TEXT)
    for index, (first, end) in enumerate(spans):
        owners[: len(ids)][(ids >= first) & (ids < end)] = index
    following = begin = 0
    for owner, length in zip(*(run.tolist() for run in owners.unique_consecutive(return_counts=True)), strict=True):
        steps = torch.arange(length).expand(3, -1)
        if owner != TEXT:
            time, height, width = grids[owner][0], grids[owner][1] // merge_size, grids[owner][2] // merge_size
            token = ids[begin : begin + length] - spans[owner][0]
            steps = torch.stack((token // (height * width) % time, token // width % height, token % width))
        mrope_pos_ids[:, begin : begin + length] = steps + following
        following += int(steps.max()) + 1
        begin += length
    return following


def _dimension(where: Tensor, dim: int) -> Tensor:
    return where[..., dim] if where.dim() == 3 else where


def _positions(batch: int, tokens: int, position: int, positions: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """(batch, tokens), or (batch, tokens, dimensions)."""
    steps = torch.arange(tokens)
    if positions is not None:
        return positions.view(-1, 1).long() + steps
    if position_ids is None:
        return (steps + position).expand(batch, tokens)
    where = position_ids.long().view(batch, tokens, -1)
    return where[..., 0] if where.shape[-1] == 1 else where


def _rotation(where: Tensor, inv_freq: Tensor) -> Tensor:
    """Angles, (batch, tokens, pairs)."""
    if inv_freq.dim() == 1:
        return where.unsqueeze(-1).float() * inv_freq.float()
    table = inv_freq.float().view(-1, *inv_freq.shape[-2:])[: len(where)].expand(len(where), -1, -1)
    return torch.stack([row[index] for row, index in zip(table, where, strict=True)])


def _factors(angles: Tensor, attn_factor: float, mode: int) -> tuple[Tensor, Tensor]:
    """Of each element of a head, and of the one it is paired with: (batch, tokens, 1, 2 pairs)."""
    cos, sin = angles.cos() * attn_factor, angles.sin() * attn_factor
    if mode == NEOX:
        factors = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    elif mode == GPTJ:
        factors = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        raise NotImplementedError(f"The CPU kernels do not know rotary style {mode}.")
    return factors[0].unsqueeze(2), factors[1].unsqueeze(2)


@lru_cache(maxsize=4)
def _running(
    frequencies: tuple[float, ...], starts: tuple[int, ...], tokens: int, attn_factor: float, mode: int
) -> tuple[Tensor, Tensor]:
    """The factors of tokens that follow each other, which are those of all layers of a pass."""
    where = torch.tensor(starts).view(-1, 1) + torch.arange(tokens)
    return _factors(_rotation(where, torch.tensor(frequencies)), attn_factor, mode)


def _frequencies(inv_freq: Tensor) -> tuple[float, ...]:
    return tuple(inv_freq.tolist())


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    swapped = x.roll(x.shape[-1] // 2, -1) if mode == NEOX else x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    x.mul_(cos).addcmul_(swapped, sin)


def _llama4_scale(where: Tensor, beta: float, original: int) -> Tensor | None:
    if beta <= 0.0:
        return None
    steps = torch.div(where, original, rounding_mode="floor").float()
    return (1.0 + beta * torch.log1p(steps)).unsqueeze(-1).unsqueeze(-1)
