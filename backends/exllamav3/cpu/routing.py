"""Mixture of experts: which experts a token goes to; `routing.cu`. The experts themselves are ordinary layers.

Logits, choice and weights are computed in fp32 from inputs of any float type, and written in the type of their tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["routing_ds3_group", "routing_ds3_nogroup", "routing_gemv_f32", "routing_sel_norm", "routing_std"]

SQRT_SOFTPLUS = 1  # of `act_fn`; 0 is the sigmoid
NOTHING = 1e-20  # added to a sum of weights before a division by it


def routing_std(
    hidden: Tensor,
    gate: Tensor,
    scores: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    per_expert_scale: Tensor | None = None,
    gate_t: Tensor | None = None,
    bias: Tensor | None = None,
    gate_i8: Tensor | None = None,
    gate_sb: Tensor | None = None,
) -> None:
    """The k largest logits, and the softmax over these (Jiang et al. 2024, "Mixtral of Experts", section 2.1).

    Args:
        hidden: (rows, dim).
        gate: (dim, experts).
        scores: out, (rows, experts) logits.
        topk_indices: out, (rows, k) int64.
        topk_weights: out, (rows, k).
        gate_t: the gate as GPUs read it faster, like gate_i8 and gate_sb; not used.
        per_expert_scale: (experts,) applied to the weights.
        bias: (experts,) added to the logits.
    """
    logits = hidden.float() @ gate.float()
    if bias is not None:
        logits = logits + bias.float()
    chosen = logits.topk(topk_indices.shape[-1], dim=-1)
    weights = chosen.values.softmax(-1)
    if per_expert_scale is not None:
        weights = weights * per_expert_scale.float()[chosen.indices]
    scores.copy_(logits)
    topk_indices.copy_(chosen.indices)
    topk_weights.copy_(weights)


def routing_ds3_nogroup(
    hidden: Tensor,
    gate: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    topk_indices: Tensor,
    topk_weights: Tensor,
    scaling_factor: float,
    gate_t: Tensor | None = None,
    act_fn: int = 0,
    gate_i8: Tensor | None = None,
    gate_sb: Tensor | None = None,
) -> None:
    """Scores activated one by one; the bias takes part in the choice only, the weights add up to the scaling factor.

    DeepSeek-V3 (2024), section 2.1.2. Arguments as of `routing_std`, but:

    Args:
        bias: (experts,) added to the activated logits.
        act_fn: 0 is the sigmoid, 1 the root of softplus (DeepSeek-V4).
    """
    logits = hidden.float() @ gate.float()
    activated = _activated(logits, act_fn)
    # Without a bias the order is that of the logits, which differ where large ones have activations that do not.
    ranked = logits if bias is None else activated + bias.float()
    scores.copy_(logits)
    _choose(ranked, activated, topk_indices, topk_weights, scaling_factor)


def routing_ds3_group(
    scores: Tensor,
    bias: Tensor | None,
    topk_indices: Tensor,
    topk_weights: Tensor,
    scaling_factor: float,
    act_fn: int,
    n_group: int,
    topk_group: int,
) -> None:
    """As `routing_ds3_nogroup`, among the experts of the best groups; `routing_ds3_group_topk_kernel`.

    A group is worth the sum of its two best ranks.

    Args:
        scores: (rows, experts) logits.
        n_group: groups of as many consecutive experts each, of which `topk_group` are kept.
    """
    activated = _activated(scores, act_fn)
    ranked = (activated if bias is None else activated + bias.float()).unflatten(-1, (n_group, -1))
    worth = ranked.topk(min(2, ranked.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(topk_group, dim=-1).indices, True)
    ranked = ranked.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    _choose(ranked, activated, topk_indices, topk_weights, scaling_factor)


def routing_sel_norm(
    hidden: Tensor,
    gate: Tensor,
    scores: Tensor,
    selected: Tensor,
    weights: Tensor,
    scaling_factor: float,
    gate_t: Tensor | None = None,
    act_fn: int = 0,
    gate_i8: Tensor | None = None,
    gate_sb: Tensor | None = None,
) -> None:
    """The weights of `routing_ds3_nogroup` for experts that are given: `selected`, (rows, k) int64."""
    logits = hidden.float() @ gate.float()
    scores.copy_(logits)
    weights.copy_(_shares(_activated(logits, act_fn), selected, scaling_factor))


def routing_gemv_f32(hidden: Tensor, gate_t: Tensor, scores: Tensor) -> None:
    """The logits of one row: hidden is (dim,), gate_t (experts, dim), and the output scores (experts,) in fp32."""
    torch.mv(gate_t.float(), hidden.float(), out=scores)


def _activated(logits: Tensor, act_fn: int) -> Tensor:
    return F.softplus(logits).sqrt() if act_fn == SQRT_SOFTPLUS else torch.sigmoid(logits)


def _choose(
    ranked: Tensor, activated: Tensor, topk_indices: Tensor, topk_weights: Tensor, scaling_factor: float
) -> None:
    indices = ranked.topk(topk_indices.shape[-1], dim=-1).indices
    topk_indices.copy_(indices)
    topk_weights.copy_(_shares(activated, indices, scaling_factor))


def _shares(activated: Tensor, indices: Tensor, scaling_factor: float) -> Tensor:
    weights = activated.gather(-1, indices)
    return weights * (scaling_factor / (weights.sum(-1, keepdim=True) + NOTHING))
