"""Gated activations and element-wise gates, computed in fp32."""

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
    """z = silu(x) * y. With a limit above 0, silu(x) is cut from above at it and y on both sides."""
    _act_mul(F.silu, x, y, z, act_limit)


def gelu_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with the tanh form of GELU."""
    _act_mul(lambda value: F.gelu(value, approximate="tanh"), x, y, z, act_limit)


def relu_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with ReLU."""
    _act_mul(F.relu, x, y, z, act_limit)


def relu2_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """As `silu_mul`, with the square of ReLU."""
    _act_mul(lambda value: F.relu(value).square(), x, y, z, act_limit)


def _act_mul(activation: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    gate, value = activation(x.float()), y
    if act_limit != 0.0:
        gate, value = gate.clamp(max=act_limit), y.float().clamp(-act_limit, act_limit)
    if z.dtype == torch.half:
        z.copy_((gate * value).clamp_(-HALF_MAX, HALF_MAX))
    else:
        torch.mul(gate, value, out=z)


def silu_oai_mul(x: Tensor, y: Tensor, z: Tensor, act_limit: float) -> None:
    """z = x sigmoid(1.702 x) (y + 1), the activation of gpt-oss; the limit cuts the inputs."""
    gate, value = x.float(), y.float()
    if act_limit != 0.0:
        gate, value = gate.clamp(max=act_limit), value.clamp(-act_limit, act_limit)
    z.copy_(gate * torch.sigmoid(1.702 * gate) * (value + 1.0))


def xielu(x: Tensor, y: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> None:
    """y = xIELU of x (Huang and Schlag 2024), whose two slopes are softplus of one number each.

    As trained in bf16: in its precision, the -1e-6 that bounds the exponent is -9.9838e-07.
    """
    x = x.float()
    positive, negative = F.softplus(alpha_p.float()), F.softplus(alpha_n.float()) + 0.5
    below = (torch.expm1(x.clamp(max=-9.9838e-07)) - x) * negative
    y.copy_(torch.where(x > 0, positive * x * x, below) + 0.5 * x)


def mul_sigmoid_(x: Tensor, y: Tensor) -> None:
    """x *= sigmoid(y)"""
    x.copy_(x.float() * torch.sigmoid(y.float()).view(x.shape))


def mul_sigmoid_broadcast_(x: Tensor, y: Tensor) -> None:
    """x *= sigmoid(y), one y for the last dimension of x."""
    x.copy_(x.float() * torch.sigmoid(y.float()).unsqueeze(-1))


def mul_softplus_broadcast_(x: Tensor, y: Tensor) -> None:
    """x *= softplus(y), one y for the last dimension of x."""
    x.copy_(x.float() * F.softplus(y.float()).unsqueeze(-1))


def add_sigmoid_gate(x: Tensor, y: Tensor, z: Tensor) -> None:
    """z += x * sigmoid(y), y of shape (..., 1)."""
    z.add_((x.float() * torch.sigmoid(y.float())).to(z.dtype))


def add_sigmoid_gate_proj(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> None:
    """z += x * sigmoid(y @ w), w of shape (dim, 1)."""
    add_sigmoid_gate(x, y.float() @ w.float(), z)


def deinterleave_qg(qg: Tensor, q: Tensor, g: Tensor, head_dim: int) -> None:
    """Split rows of [query | gate] per head into queries and gates."""
    pairs = qg.view(*qg.shape[:-1], -1, 2, head_dim)
    q.view(*qg.shape[:-1], -1, head_dim).copy_(pairs[..., 0, :])
    g.view(*qg.shape[:-1], -1, head_dim).copy_(pairs[..., 1, :])
