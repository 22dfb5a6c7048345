"""Kimi Delta Attention: the delta rule of Gated DeltaNet with a decay per channel of the key.

The recurrence ("Kimi Linear", Kimi Team 2025, section 3), with a state S of (key dim, value dim):

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = q_t^T S_t

A few tokens go through `delta_net.cuda_recurrent_gated_delta_rule`, as in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.exllamav3.cpu.delta_net import CHUNK, chunked_delta_rule, normalised


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence over many tokens. Arguments and results are those of `delta_net.chunked_delta_rule`, but:

    Args:
        g: (batch, tokens, value heads, key dim) log decay.
        use_qk_l2norm_in_kernel: q and k are yet to be normalised.
    """
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q), normalised(k)
    return chunked_delta_rule(q, k, v, g, beta, initial_state, output_final_state, _decayed_products)


def _decayed_products(rows: Sequence[Tensor], k: Tensor, decay: Tensor) -> list[Tensor]:
    """See `chunked_delta_rule`; the decay differs between channels.

    As a product of two matrices this is (a exp(d)) (k exp(-d))^T, whose second factor overflows under a strong decay.
    With the decay counted from a token between i and j both factors are at most 1 instead: a chunk is halved, the later
    half is multiplied with the earlier one from the end of the earlier one, and both halves are treated alike.
    """
    products = [torch.diag_embed((row * k).sum(-1)) for row in rows]
    half = CHUNK // 2
    while half:
        halves = CHUNK // (2 * half), 2, half
        earlier, later = decay.unflatten(-2, halves).unbind(-3)
        middle = earlier[..., -1:, :]
        keys = k.unflatten(-2, halves)[..., 0, :, :] * (middle - earlier).exp()
        since_middle = (later - middle).exp()
        for row, product in zip(rows, products, strict=True):
            block = (row.unflatten(-2, halves)[..., 1, :, :] * since_middle) @ keys.transpose(-1, -2)
            # The same halves of rows and columns: (..., half, half, blocks) below the diagonal.
            target = product.unflatten(-2, halves).unflatten(-1, halves)[..., :, 1, :, :, 0, :]
            target.diagonal(dim1=-4, dim2=-2).copy_(block.movedim(-3, -1))
        half //= 2
    return products
