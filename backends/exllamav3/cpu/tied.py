"""Output layers whose weights are the embedding's: one matrix for both.

The embedding is a fifth of SmolLM2-135M and more than half of Gemma 3 270M, and FBGEMM pads what it packs to multiples
of 512 inputs: packed, the output layer of the first would take 96 MiB beside the embedding's 54. Shared, both take 60.

Measured on that layer, with one thread on a CPU with AVX2: at one row `torch.mv` in fp16 takes the time of FBGEMM's
product, half of what widening takes. At 8 and 64 rows widening takes 1.9 and 1.7 times FBGEMM's; in steps of 2 MiB,
which stay in the cache, half of the time that steps of 8 MiB take.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.linear import PlainMatrix

STEP: Final = 1 << 19  # weights that are widened at a time
ROWS: Final = 1 << 10  # that are compared at a time
EXACT: Final = 64  # logits of a row that are computed in fp32, where the others are in fp16


class TiedMatrix(PlainMatrix):
    """Its transpose is the embedding, which holds it."""

    def __init__(self, embedding: Tensor) -> None:
        """
        Args:
            embedding: (out, in), fp16, contiguous.
        """
        super().__init__(embedding.T)
        self.nbytes = 0  # counted with the embedding

    def _vector_product(self, row: Tensor) -> Tensor:
        """In fp16, which would round away what tells near ties apart: hence the largest once more in fp32."""
        out = super()._vector_product(row)
        largest = out.topk(min(EXACT, len(out))).indices
        out[largest] = self._transpose[largest].float() @ row
        return out

    def _matrix_product(self, rows: Tensor) -> Tensor:
        parts = self._transpose.split(max(1, STEP // rows.shape[-1]))
        return torch.cat([F.linear(rows, part.float()) for part in parts], dim=-1)


def tie(layer: Any, modules: Iterable[Any]) -> None:
    """Give one matrix to an output layer that was just loaded and to the embedding that it was loaded from, if any.

    Args:
        layer: of the engine's modules, any.
        modules: the model's.
    """
    if not getattr(layer, "used_alt_key", False):
        return
    for module in modules:
        embedding = getattr(getattr(module, "embedding", None), "weight", None)
        if isinstance(embedding, Tensor) and module.key == layer.alt_key:
            weight = layer.inner.weight.T.contiguous()
            tokens, size = embedding.shape
            shared = weight[:tokens, :size]  # the output layer's is padded
            pairs = zip(shared.split(ROWS), embedding.split(ROWS), strict=True)
            if all(torch.equal(ours, its.half()) for ours, its in pairs):
                module.embedding.weight.data = shared
                layer.inner.matrix, layer.inner.plain_weight = TiedMatrix(weight), None
