"""RMS norms (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization") and the soft cap of logits.

Inputs and weights are of any float type; arithmetic is fp32, and what is written has the type of its tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

__all__ = ["BC_GatedRMSNorm", "gated_rms_norm", "rms_norm", "rms_norm_res_in", "softcap"]

HALF_MAX = 65504.0
SIGMOID_GATE = 1  # of `gate_act`; 0 is SiLU

_ZERO = torch.zeros(())


class BC_GatedRMSNorm:
    """What the engine would hand to its compiled blocks, of which there are none here."""

    def __init__(self, *arguments: object) -> None:
        pass


def prepare(modules: Iterable[Any]) -> None:
    """Widen the weights of norms that have just been loaded, once: they are small, and each is read at every step."""
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Parameter) and weight.dim() == 1:
            weight.data = weight.float()


def rms_norm(
    x: Tensor,
    w: Tensor | None,
    y: Tensor,
    epsilon: float,
    constant_bias: float,
    constant_scale: float,
    span_heads: bool,
    add_residual: bool,
    w_groups: int = 1,
) -> None:
    """y = x / rms(x) * scale * (w + bias), over the last dimension; `rms_norm_kernel` in norm.cu.

    rms(x) is sqrt(mean(x^2) + epsilon).

    Args:
        x: (..., dim).
        w: (dim,), None for ones.
        y: out, as x, and may be x.
        span_heads: normalise over heads and head dimension together: x and y are (..., heads, head_dim), and dim is the
            product of the last two.
        add_residual: add to what y holds instead.
        w_groups: rows of the weight, (w_groups * dim,) or (w_groups, dim); row i of x, counted over all other
            dimensions, takes row i % w_groups.
    """
    if span_heads:
        x, y = x.flatten(-2), y.flatten(-2)
    in_place = y.dtype == torch.float and not add_residual
    if in_place and w is not None and constant_bias == 0.0 and x.dtype == torch.float and x.numel() == x.shape[-1]:
        _norm_of_row(x, w, y, epsilon, constant_scale)
        return
    result = _normalised(_widened(x), epsilon, y if in_place else None)
    if w is not None:
        _weight_(result, w, constant_bias, w_groups)
    if constant_scale != 1.0:
        result *= constant_scale
    if add_residual:
        y += result
    elif not in_place:
        y.copy_(result)


def rms_norm_res_in(
    x: Tensor, w: Tensor | None, y: Tensor, r: Tensor, epsilon: float, constant_bias: float, constant_scale: float
) -> None:
    """r += x, rounded to r's type; then y = norm(r), see `rms_norm`. All three are (..., dim)."""
    r += _finite(x)
    rms_norm(r, w, y, epsilon, constant_bias, constant_scale, span_heads=False, add_residual=False)


def gated_rms_norm(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    g: Tensor,
    epsilon: float,
    constant_bias: float,
    w_groups: int = 1,
    gate_first: bool = False,
    gate_act: int = 0,
) -> None:
    """y = norm(x) * (w + bias) * act(g), or norm(x * act(g)) * (w + bias) with `gate_first` (Mamba2).

    `gated_rms_norm_kernel` in norm.cu. Arguments as of `rms_norm`; g is as x, act is SiLU, or the sigmoid with
    `gate_act` 1 (KDA).
    """
    gate = g.float().view(x.shape)
    gate = torch.sigmoid(gate) if gate_act == SIGMOID_GATE else F.silu(gate)
    value = _widened(x) * gate if gate_first else _widened(x)
    if w_groups > 1:
        value = value.view(-1, w.numel() // w_groups)
    value = _weight_(_normalised(value, epsilon), w, constant_bias, w_groups).view(x.shape)
    y.copy_(value if gate_first else value * gate)


def softcap(x: Tensor, y: Tensor, scale: float) -> None:
    """y = scale * tanh(x / scale), of one shape, and may be the same (Gemma 2, 2024, section 2)."""
    y.copy_(torch.tanh(x.float() / scale) * scale)


def _finite(x: Tensor) -> Tensor:
    """What overflowed in fp16 counts as its largest number, or a single infinity would zero the whole row."""
    return x.clamp(-HALF_MAX, HALF_MAX) if x.dtype == torch.half else x


def _widened(x: Tensor) -> Tensor:
    return _finite(x).float()


def _norm_of_row(x: Tensor, w: Tensor, y: Tensor, epsilon: float, scale: float) -> None:
    """For a decode step: in half the time that `_normalised` and `_weight_` take."""
    row = x.view(-1)
    mean_square = torch.dot(row, row).item() / len(row)
    torch.addcmul(_ZERO, x, w, value=scale / math.sqrt(mean_square + epsilon), out=y)


def _normalised(x: Tensor, epsilon: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon). `F.rms_norm` takes ten operations for it on the CPU, each a pass over x or two."""
    rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return torch.div(x, torch.hypot(rms, _root(epsilon)), out=out)


@cache
def _root(epsilon: float) -> Tensor:
    return torch.tensor(epsilon).sqrt()


def _weight_(x: Tensor, w: Tensor, constant_bias: float, w_groups: int) -> Tensor:
    """x *= w + bias"""
    weight = w if constant_bias == 0.0 else w.float() + constant_bias
    if w_groups == 1:
        x *= weight
    else:
        x.view(-1, w_groups, x.shape[-1]).mul_(weight.view(w_groups, -1))
    return x
