"""Mixture of experts: which experts a token goes to. The engine runs the experts themselves as ordinary layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["routing_ds3_nogroup", "routing_std"]

SQRT_SOFTPLUS = 1  # of `act_fn`; 0 is the sigmoid


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
    """Softmax over the logits of the chosen experts.

    Args:
        hidden: (rows, dim).
        gate: (dim, experts); the other forms of it are for GPUs.
        scores: out, (rows, experts) logits.
        topk_indices: out, (rows, k); topk_weights alike.
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

    Arguments as of `routing_std`.
    """
    logits = hidden.float() @ gate.float()
    activated = F.softplus(logits).sqrt() if act_fn == SQRT_SOFTPLUS else torch.sigmoid(logits)
    ranked = activated if bias is None else activated + bias.float()
    indices = ranked.topk(topk_indices.shape[-1], dim=-1).indices
    weights = activated.gather(-1, indices)
    scores.copy_(logits)
    topk_indices.copy_(indices)
    topk_weights.copy_(weights * (scaling_factor / (weights.sum(-1, keepdim=True) + 1e-20)))
