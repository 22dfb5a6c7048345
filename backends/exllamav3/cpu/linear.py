"""Matrix products of layers with weights in 16 bits: each held once, in the form that the CPU multiplies by fastest.

Tried on the layers of SmolLM2-135M, one thread on a CPU with AVX2 (the whole is in `benchmarks/cpu_kernels.py`):

* FBGEMM's product of fp32 rows and a packed fp16 matrix takes less time than MKL's of two fp32 matrices: at one row
  0.55 to 0.73 of it, at eight 0.4 to 0.5, at 256 and 1,024 0.83 to 0.89. At one row it takes 0.83 to 0.87 of the time
  of `torch.mv` in fp16 or bf16.
* One matrix for query, key and value and one for gate and up: with two threads a decode step takes 0.90 of the time and
  a prefill 0.93, with one thread as long and 0.95.
* Widening a layer into a shared fp32 buffer before each product costs up to an eighth at 256 rows and little at 1,024.
  This is done where torch has no FBGEMM.
* Without AVX-512, products in bf16 take five to seven times as long as in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BC_LinearFP16", "hgemm"]

HAS_FBGEMM: Final = "fbgemm" in torch.backends.quantized.supported_engines
# (..., in) in fp32 by a packed matrix. This is the operator itself: what `torch.ops` looks for in the arguments first
# takes as long as a small product.
_multiply: Final = torch.ops.quantized.linear_dynamic_fp16._op
# Weights that are packed at a time. FBGEMM walks through columns, several times slower where they leave the cache.
BLOCK: Final = 1 << 21
PANEL: Final = 16  # outputs are padded to a multiple of it
PANEL_ROWS: Final = 512  # inputs are, too; the padding is zeros, which take memory
# Without FBGEMM, up to here fp16 products of a matrix and a vector are quicker than widening: they read half the bytes.
VECTOR_ROWS: Final = 2
# Layers with fewer weights are left as they are when a model is loaded: the engine reads some of these itself.
SMALL: Final = 1 << 16


class BC_LinearFP16:
    """What the engine would hand to its compiled blocks, of which there are none here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        pass


def hgemm(a: Tensor, b: Tensor, c: Tensor) -> None:
    """c = a @ b"""
    c.copy_(a.float() @ b.float())


class Matrix(Protocol):
    """A layer's weight."""

    nbytes: int

    def product(self, x: Tensor) -> Tensor:
        """(..., in) of any type to (..., out) in fp32."""

    def weight(self) -> Tensor:
        """(in, out), fp16: a copy, or the matrix itself."""


class PackedMatrix:
    """In blocks of outputs, as FBGEMM packs them: 16 bits a weight, and what pads the inputs."""

    def __init__(self, weight: Tensor) -> None:
        """Pack (in, out); some 70 million weights a second."""
        rows = weight.T
        inputs, outputs = weight.shape
        padded = -(-inputs // PANEL_ROWS) * PANEL_ROWS * -(-outputs // PANEL) * PANEL
        self.nbytes = padded * torch.half.itemsize
        step = max(1, BLOCK // rows.shape[1])
        self._blocks = [torch.ops.quantized.linear_prepack_fp16(part.float()) for part in rows.split(step)]

    def product(self, x: Tensor) -> Tensor:
        x = x.float()
        if len(self._blocks) == 1:
            out: Tensor = _multiply(x, self._blocks[0])
            return out
        return torch.cat([_multiply(x, block) for block in self._blocks], dim=-1)

    def weight(self) -> Tensor:
        parts = [torch.ops.quantized.linear_unpack_fp16(block)[0].half() for block in self._blocks]
        return torch.cat(parts).T


class PlainMatrix:
    """Its transpose, contiguous. Products of many rows widen it."""

    _buffer = torch.empty(0)

    def __init__(self, weight: Tensor) -> None:
        self._transpose = weight.T.half().contiguous()
        self.nbytes = self._transpose.nbytes

    def product(self, x: Tensor) -> Tensor:
        rows = x.float().reshape(-1, x.shape[-1])
        if len(rows) <= VECTOR_ROWS:
            out = torch.stack([self._vector_product(row) for row in rows])
        else:
            out = self._matrix_product(rows)
        return out.view(*x.shape[:-1], -1)

    def weight(self) -> Tensor:
        return self._transpose.T

    def _vector_product(self, row: Tensor) -> Tensor:
        return torch.mv(self._transpose, row.half()).float()

    def _matrix_product(self, rows: Tensor) -> Tensor:
        """In a buffer that all these matrices share."""
        count = self._transpose.numel()
        if PlainMatrix._buffer.numel() < count:
            PlainMatrix._buffer = torch.empty(count)
        return F.linear(rows, PlainMatrix._buffer[:count].view_as(self._transpose).copy_(self._transpose))


def make_matrix(weight: Tensor) -> Matrix:
    """Of (in, out)."""
    return PackedMatrix(weight) if HAS_FBGEMM else PlainMatrix(weight)


class JoinedMatrix:
    """One matrix for layers that read the same input, one after the other.

    The whole product is computed for the first that asks, and kept until each has its part: nothing changes the input
    before that.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Join (in, out) of each layer."""
        self._whole = make_matrix(torch.cat([*weights], dim=1))
        self._sizes = [weight.shape[1] for weight in weights]
        self._x: Tensor | None = None
        self._products: dict[int, Tensor] = {}

    def parts(self) -> list[JoinedPart]:
        return [JoinedPart(self, index) for index in range(len(self._sizes))]

    def product(self, x: Tensor, index: int) -> Tensor:
        if x is not self._x or index not in self._products:
            self._x, self._products = x, dict(enumerate(self._whole.product(x).split(self._sizes, dim=-1)))
        out = self._products.pop(index)
        if not self._products:
            self._x = None
        return out

    def weight(self, index: int) -> Tensor:
        weight: Tensor = self._whole.weight().split(self._sizes, dim=1)[index]
        return weight

    def nbytes(self, index: int) -> int:
        return self._whole.nbytes * self._sizes[index] // sum(self._sizes)


class JoinedPart:
    """One layer's columns of a joined matrix."""

    def __init__(self, joined: JoinedMatrix, index: int) -> None:
        self._joined, self._index = joined, index
        self.nbytes = joined.nbytes(index)

    def product(self, x: Tensor) -> Tensor:
        return self._joined.product(x, self._index)

    def weight(self) -> Tensor:
        return self._joined.weight(self._index)


def with_matrix(layer_class: type) -> type:
    """Let a class of layers hold its attribute `weight`, (in, out), as a matrix instead, once `matrix_of` made one.

    It can still be read, which unpacks it, and set.
    """

    def read(layer: Any) -> Tensor:
        weight: Tensor = layer.plain_weight if layer.matrix is None else layer.matrix.weight()
        return weight

    def write(layer: Any, weight: Tensor) -> None:
        layer.plain_weight, layer.matrix = weight, None

    layer_class.weight = property(read, write)  # type: ignore[attr-defined]  # it has none, or one that this replaces
    return layer_class


def matrix_of(layer: Any) -> Matrix:
    """Weights are filled after the layer is made, hence not before its first use."""
    if layer.matrix is None:
        layer.matrix, layer.plain_weight = make_matrix(layer.plain_weight), None
    matrix: Matrix = layer.matrix
    return matrix


def prepare(modules: Iterable[Any]) -> None:
    """Make the matrices of the engine's modules that have just been loaded."""
    modules = [*modules]
    for module in modules:
        for sharing in _sharing_an_input(module):
            _join([getattr(layer, "inner", None) for layer in sharing])
    for module in modules:
        layer = getattr(module, "inner", None)
        if layer is not None and hasattr(layer, "matrix") and layer.in_features * layer.out_features >= SMALL:
            matrix_of(layer)


def _sharing_an_input(module: Any) -> Iterator[list[Any]]:
    """Layers of an attention or of a gated MLP that are called one after the other with the same tensor."""
    projections = (getattr(module, f"{name}_proj", None) for name in ("q", "g", "k", "v"))
    yield [layer for layer in projections if layer is not None]
    for gate, up in zip(getattr(module, "gates", ()), getattr(module, "ups", ()), strict=False):
        yield [gate, up]


def _join(layers: Sequence[Any]) -> None:
    if len(layers) < 2 or not all(hasattr(layer, "matrix") and layer.matrix is None for layer in layers):
        return
    weights = [layer.plain_weight for layer in layers]
    if len({len(weight) for weight in weights}) == 1 and sum(weight.numel() for weight in weights) >= SMALL:
        for layer, part in zip(layers, JoinedMatrix(weights).parts(), strict=True):
            layer.matrix, layer.plain_weight = part, None


def linear_forward(layer: Any, x: Tensor, params: dict[str, Any], out_dtype: torch.dtype | None = None) -> Tensor:
    """`LinearFP16.forward`: x @ weight + bias, of a layer whose class is one `with_matrix`.

    Returns:
        fp32 where neither the caller nor the layer asks for another type.
    """
    out = matrix_of(layer).product(x)
    if layer.bias is not None:
        out += layer.bias
    dtype = out_dtype or layer.out_dtype or torch.float
    return out if dtype == torch.float else out.to(dtype)
