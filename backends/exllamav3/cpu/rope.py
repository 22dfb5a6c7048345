"""Rotary position embedding, with the norm of heads that the engine fuses into it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Normalise heads where there is a weight, then rotate; outputs may be the inputs.

    Args:
        q: (batch, tokens, heads, head_dim), k alike.
        inv_freq: frequencies (pairs,), or angles (positions, pairs) with an optional batch dimension before.
        position: of the first token, where the next two are None.
        positions: (batch,) position of each row's first token.
        position_ids: (batch, tokens) or (batch, tokens, rotate_dims) position of every token; used without `positions`.
        attn_factor: scale of cosine and sine.
        l4_beta: above 0, queries are scaled by 1 + beta ln(1 + floor(position / l4_original)) (Llama 4).
        rotate_dims: how many position dimensions take turns along the head, each its own segment.
        rotate_offset: first element of the head that is rotated.
    """
    batch, tokens = q.shape[:2]
    steps = torch.arange(tokens)
    if positions is not None:
        where = positions.view(-1, 1).long() + steps
    elif position_ids is not None:
        where = position_ids.long().view(batch, tokens, -1)
        where = where[..., 0] if where.shape[-1] == 1 else where
    else:
        where = (steps + position).expand(batch, tokens)

    rotations = [_rotation(_dimension(where, dim), inv_freq, attn_factor) for dim in range(rotate_dims)]
    heads = [(q, out_q, q_norm, _llama4_scale(_dimension(where, 0), l4_beta, l4_original))]
    if k is not None and out_k is not None:
        heads.append((k, out_k, k_norm, None))
    for source, target, norm, scale in heads:
        x = source.float().clone() if norm is None else _normalised(source, norm, norm_eps, norm_constant_bias)
        start = rotate_offset
        for cos, sin in rotations:
            width = 2 * cos.shape[-1]
            _rotate_(x[..., start : start + width], cos, sin, rope_mode)
            start += width
        target.copy_(x if scale is None else x * scale)


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
        mrope_pos_ids: (3, positions), written to; past the ids they go on as for text.
        ids: (tokens,)
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


def _rotation(where: Tensor, inv_freq: Tensor, attn_factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (batch, tokens, 1, pairs)."""
    if inv_freq.dim() == 1:
        angles = where.unsqueeze(-1).float() * inv_freq.float()
    else:
        table = inv_freq.float().view(-1, *inv_freq.shape[-2:]).expand(where.shape[0], -1, -1)
        angles = torch.stack([row[index] for row, index in zip(table, where, strict=True)])
    angles = angles.unsqueeze(2)
    return angles.cos() * attn_factor, angles.sin() * attn_factor


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    if mode == NEOX:
        a, b = x.chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
    elif mode == GPTJ:
        a, b = x[..., 0::2], x[..., 1::2]
        x.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))
    else:
        raise NotImplementedError(f"The CPU kernels do not know rotary style {mode}.")


def _normalised(x: Tensor, weight: Tensor, epsilon: float, constant_bias: float) -> Tensor:
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float() + constant_bias, epsilon)
    return normed.half().float()  # the engine rounds here


def _llama4_scale(where: Tensor, beta: float, original: int) -> Tensor | None:
    if beta <= 0.0:
        return None
    steps = torch.div(where, original, rounding_mode="floor").float()
    return (1.0 + beta * torch.log1p(steps)).unsqueeze(-1).unsqueeze(-1)
