"""Latent attention that sees the best tokens only (DeepSeek-V3.2, 2025, section 2.1: the lightning indexer).

A small head scores every token for every query; the query then attends to the `k` latents with the highest scores. All
arithmetic is fp32, scores are rounded to fp16 as the engine expects them. The names are those of the engine's
`dsa_triton.py` and `dsa_topk.cu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.exllamav3.cpu.quantised_cache import dequantise

__all__ = ["dsa_topk"]

# In what grows with queries and keys together: products of an indexer's heads, or latents of several queries, each with
# its own choice.
NUMBERS_AT_ONCE = 1 << 24
NO_TOKEN = -1


def dsa_indexer_scores(
    q_idx: Tensor,
    weights: Tensor,
    k_idx: Tensor,
    q_pos0: int,
    compress_rate: int,
    bound_max: int,
    scores: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    epp: int = 0,
    scale: float | None = None,
) -> Tensor:
    """scores[r, t] = scale * sum over heads h of weights[r, h] relu(q[r, h] . k[t]), -inf for what r must not see.

    Args:
        q_idx: (rows, heads, dim) of any float type, at the positions from `q_pos0` on.
        weights: (rows, heads).
        k_idx: (entries, dim), or all pages of a pool in a row with `block_table`.
        compress_rate: tokens that an entry stands for; one that is not complete is not seen.
        bound_max: entries that there are.
        scores: out, at least (rows, entries) fp16, of which the beginning is filled.
        block_table: the pages of the sequence, each of `epp` entries.
        scale: None is (dim * heads)^-0.5.

    Returns:
        (rows, entries) fp16, a part of `scores` if these are given.
    """
    rows, heads, dim = q_idx.shape
    if block_table is None:
        keys = k_idx
    else:
        entry = torch.arange(bound_max)
        keys = k_idx[block_table.flatten().long()[entry // epp] * epp + entry % epp]
    q, w = q_idx.float(), weights.float()
    result = torch.empty(rows, len(keys))
    step = max(1, NUMBERS_AT_ONCE // (rows * heads))
    for start in range(0, len(keys), step):
        products = torch.einsum("rhd,td->rht", q, keys[start : start + step].float()).relu_()
        result[:, start : start + step] = torch.einsum("rht,rh->rt", products, w)
    result *= (dim * heads) ** -0.5 if scale is None else scale
    bound = ((torch.arange(q_pos0, q_pos0 + rows) + 1) // compress_rate).clamp(max=bound_max)
    result.masked_fill_(torch.arange(len(keys)) >= bound.unsqueeze(-1), float("-inf"))
    if scores is None:
        return result.half()
    filled = scores[:rows, : len(keys)]
    filled.copy_(result)
    return filled


def dsa_topk(scores: Tensor, indices: Tensor, k: int, t_ptr: Tensor | None = None, t_seq: int = 0) -> None:
    """The entries with the k highest scores of each row; `indices` is (rows, at least k) int32, filled up with -1.

    Args:
        scores: (rows, entries) of any float type; -inf is never chosen.
        t_ptr: for captured CUDA graphs, of which there are none here; t_seq alike.
    """
    best = scores.float().topk(min(k, scores.shape[-1]), dim=-1)
    indices.fill_(NO_TOKEN)
    indices[:, : best.indices.shape[-1]] = best.indices.masked_fill(best.values.isneginf(), NO_TOKEN)


def dsa_attn(
    q: Tensor,
    pool_c: Tensor,
    pool_r: Tensor,
    block_table: Tensor,
    *,
    indices: Tensor | None = None,
    k_len: int = 0,
    scale: float,
    page_size: int,
    q_pe: Tensor | None = None,
    out_latent: bool = False,
    qc: tuple[Tensor, int] | None = None,
    pool_len: int = 0,
) -> Tensor:
    """Attention of each query to the latents that were chosen for it, in absorbed form (see `latent_attention`).

    Args:
        q: (heads, rows, rank).
        pool_c: (pages, page size, 1, rank), or the words of a quantised cache.
        pool_r: (pages, page size, 1, dim), rotated keys.
        block_table: (1 or rows, pages).
        indices: (rows, k) positions, -1 for none; a query with none gets zeros.
        k_len: how many of the k count; 0 for all.
        q_pe: (rows, heads, dim).
        qc: scales and bits of a quantised cache.
        pool_len: positions that there are, for a GPU to size its work by; not used.

    Returns:
        Like q, fp32.

    Raises:
        NotImplementedError: for the forms that other models than those with latent attention use.
    """
    if indices is None or q_pe is None or not out_latent:
        raise NotImplementedError("The CPU kernels have no attention over compressed pools. Use a CUDA GPU.")
    heads, rows, rank = q.shape
    indices = indices[:, : k_len or None]
    out = torch.empty(heads, rows, rank)
    step = max(1, NUMBERS_AT_ONCE // (indices.shape[1] * (rank + q_pe.shape[-1])))
    for start in range(0, rows, step):
        block = slice(start, start + step)
        chosen = indices[block].long()
        position = chosen.clamp(min=0)
        pages = block_table.long().expand(rows, -1)[block].gather(1, position // page_size)
        place = pages, position % page_size
        latents = pool_c[place] if qc is None else dequantise(pool_c[place], qc[0][place])
        latents, rotated = latents.flatten(2).float(), pool_r[place].flatten(2).float()
        logits = q[:, block].transpose(0, 1).float() @ latents.mT + q_pe[block].float() @ rotated.mT
        hidden = (chosen < 0).unsqueeze(1)
        shares = logits.mul_(scale).masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0)
        out[:, block] = (shares @ latents).transpose(0, 1)
    return out
