"""Matrix products of unquantised layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BC_LinearFP16", "hgemm"]

# Up to here fp16 matrix-vector products are quicker: they read half the bytes, and their arithmetic is no bottleneck.
VECTOR_ROWS = 2


class BC_LinearFP16:
    """What the engine would hand to its compiled blocks, of which there are none here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        pass


def hgemm(a: Tensor, b: Tensor, c: Tensor) -> None:
    """c = a @ b"""
    c.copy_(a.float() @ b.float())


def linear_forward(layer: Any, x: Tensor, params: dict[str, Any], out_dtype: torch.dtype | None = None) -> Tensor:
    """`LinearFP16.forward`: x @ weight + bias.

    The layer's weight, (in, out) and fp16, is laid out anew on first use so that its transpose is contiguous, and gets
    an fp32 copy beside it when more than two rows are multiplied for the first time. Both go with the layer.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= VECTOR_ROWS:
        weight = _transposed(layer)
        out = torch.stack([torch.mv(weight, row) for row in rows.half()])
        if layer.bias is not None:
            out = out + layer.bias
    else:
        bias = layer.bias.float() if layer.bias is not None else None
        out = F.linear(rows.float(), _transposed_fp32(layer), bias)
    return out.to(out_dtype or layer.out_dtype or torch.half).view(*x.shape[:-1], layer.out_features)


def _transposed(layer: Any) -> Tensor:
    """(out, in), contiguous. Weights are filled after the layer is made, hence not before its first use."""
    weight: Tensor = layer.weight.T
    if not weight.is_contiguous():
        layer.weight = weight.contiguous().T
        weight = layer.weight.T
    return weight


def _transposed_fp32(layer: Any) -> Tensor:
    source, copy = getattr(layer, "fp32_copy", (None, None))
    if source is not layer.weight or copy is None:
        copy = _transposed(layer).float()
        layer.fp32_copy = layer.weight, copy
    return copy
