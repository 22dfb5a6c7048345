"""Gated activations and element-wise gates: `activation.cu`.

Inputs are of any float type and contiguous; arithmetic is fp32. What is written has the type of its tensor, and in fp16
stays finite. A gated activation multiplies one projection, the value y, by a function of another, the gate x (Shazeer
2020, "GLU Variants Improve Transformer"); x, y and z are of one shape, and z may be x or y.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "add_sigmoid_gate",
    "add_sigmoid_gate_proj",
    "deinterleave_qg",
    "gelu_mul",
    "mul_sigmoid_",
    "mul_sigmoid_broadcast_",
    "mul_softplus_broadcast_",
    "relu2_mul",
    "relu_mul",
    "silu_mul",
    "silu_oai_mul",
    "xielu",
]

HALF_MAX = 65504.0


def silu_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """z = silu(x) * y. With a limit above 0, silu(x) is cut from above at it and y on both sides (Step-3.5)."""
    _act_mul(F.silu, x, y, z, act_limit)


def gelu_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    _act_mul(lambda value: F.gelu(value, approximate="tanh"), x, y, z, act_limit)


def relu_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with ReLU. Of x and x it is the square of ReLU, as in NemotronH's experts."""
    _act_mul(F.relu, x, y, z, act_limit)


def relu2_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with the square of ReLU (So et al. 2021, "Primer")."""
    _act_mul(lambda value: F.relu(value).square(), x, y, z, act_limit)


def _act_mul(activation: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    gate, value = activation(x.float()), y
    if act_limit != 0.0:
        gate, value = gate.clamp(max=act_limit), y.float().clamp(-act_limit, act_limit)
    if z.dtype == torch.half:
        _store(gate * value, z)
    else:
        torch.mul(gate, value, out=z)


def _store(value: Tensor, out: Tensor) -> None:
    out.copy_(value.clamp_(-HALF_MAX, HALF_MAX) if out.dtype == torch.half else value)


def silu_oai_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """z = x sigmoid(1.702 x) (y + 1), the activation of gpt-oss; the limit cuts the inputs."""
    gate, value = x.float(), y.float()
    if act_limit != 0.0:
        gate, value = gate.clamp(max=act_limit), value.clamp(-act_limit, act_limit)
    _store(gate * torch.sigmoid(1.702 * gate) * (value + 1.0), z)


def xielu(x: Tensor, y: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> None:
    """y = xIELU of x, alike (Huang and Schlag 2024, "Deriving Activation Functions Using Integration").

    As trained in bf16: in its precision, the -1e-6 that bounds the exponent is -9.9838e-07.

    Args:
        alpha_p: one number, whose softplus is the slope above 0; alpha_n below it, plus a half.
    """
    x = x.float()
    positive, negative = F.softplus(alpha_p.float()), F.softplus(alpha_n.float()) + 0.5
    below = (torch.expm1(x.clamp(max=-9.9838e-07)) - x) * negative
    _store(torch.where(x > 0, positive * x * x, below) + 0.5 * x, y)


def mul_sigmoid_(x: Tensor, y: Tensor) -> None:
    """x *= sigmoid(y), y of as many elements as x: the gate on attention of Qwen3-Next."""
    x.copy_(x.float() * torch.sigmoid(y.float()).reshape(x.shape))


def mul_sigmoid_broadcast_(x: Tensor, y: Tensor) -> None:
    """x *= sigmoid(y) of (..., heads, dim) and (..., heads): a gate per head."""
    x.copy_(x.float() * torch.sigmoid(y.float()).unsqueeze(-1))


def mul_softplus_broadcast_(x: Tensor, y: Tensor) -> None:
    """x *= softplus(y) of (..., heads, dim) and (..., heads): Laguna's gate on attention."""
    x.copy_(x.float() * F.softplus(y.float()).unsqueeze(-1))


def add_sigmoid_gate(x: Tensor, y: Tensor, z: Tensor) -> None:
    """z += x * sigmoid(y) of (..., dim) and (..., 1): the gate of shared experts in Qwen2-MoE."""
    z.add_((x.float() * torch.sigmoid(y.float())).to(z.dtype))


def add_sigmoid_gate_proj(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> None:
    """As `add_sigmoid_gate` with the gate y @ w, of (..., dim) and (dim, 1)."""
    add_sigmoid_gate(x, y.float() @ w.float(), z)


def deinterleave_qg(qg: Tensor, q: Tensor, g: Tensor, head_dim: int) -> None:
    """Split rows of [query | gate] per head, (..., heads * 2 * head_dim), into q and g, each of half the elements."""
    pairs = qg.view(*qg.shape[:-1], -1, 2, head_dim)
    q.view(*qg.shape[:-1], -1, head_dim).copy_(pairs[..., 0, :])
    g.view(*qg.shape[:-1], -1, head_dim).copy_(pairs[..., 1, :])
