"""Weights in EXL3, the engine's trellis-coded format, decoded when they are loaded.

The format stands in the engine's CUDA sources (exllamav3_ext/quant: pack.cu, frac.cu, exl3_dq.cuh, codebook.cuh,
reconstruct.cu). A matrix (in, out), both padded to a multiple of 128, is

    W = diag(suh) H T H diag(svh)

with H the orthonormal Hadamard matrix of 128 in blocks along the diagonal. T consists of tiles of 16 x 16. A tile is a
ring of 256 K bits, K per weight, the first bit of a word of 32 being its highest; where K is a half, weights take the
integers below and above it in turn. The 16 bits of the ring that end with a weight's own are its state, and a codebook
makes a number in fp16 of it.

The layer then computes as one that was never quantised: 16 bits a weight in memory, no kernel of its own.
"""

from __future__ import annotations

import itertools
from enum import Enum
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

TILE: Final = 16
BLOCK: Final = 128  # of the Hadamard transform
TILES: Final = BLOCK // TILE
STATES: Final = 1 << 16
# Rates in halves of a bit. Those of a whole number and a half exist with the codebook MUL1 alone.
WHOLE_RATES: Final = range(2, 17, 2)
HALF_RATES: Final = range(3, 8, 2)
# Weights that are decoded at a time: what is in between takes some 30 bytes of each and should stay in the CPU's cache.
CHUNK: Final = 1 << 18


class Codebook(Enum):
    """How a state becomes a number; the values are the multipliers of a hash."""

    THREE_INSTRUCTIONS = 89226354
    MCG = 0xCBAC1FED
    MUL1 = 0x83DCD12D


@cache
def numbers(codebook: Codebook) -> Tensor:
    """What all states stand for, numbers of fp16 in fp32 (codebook.cuh, `decode_3inst`)."""
    hashed = torch.arange(STATES) * codebook.value
    if codebook is Codebook.MUL1:
        total: Tensor = sum(((hashed >> shift) & 0xFF for shift in (0, 8, 16, 24)), start=torch.tensor(1024))
        factor, offset = torch.tensor([0x1EEE, 0xC931]).to(torch.int16).view(torch.half).float()
        sums: Tensor = total * factor + offset
        return sums.half().float()
    if codebook is Codebook.THREE_INSTRUCTIONS:
        hashed = hashed + 64248484
    pairs: Tensor = (hashed & 0x8FFF8FFF) ^ 0x3B603B60
    return pairs.to(torch.int32).view(torch.half).view(STATES, 2).float().sum(-1).half().float()


def decode(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: Codebook) -> Tensor:
    """The matrix itself.

    Args:
        trellis: (in / 16, out / 16, 16 K), int16.
        suh: (in,) signs and scales of the rows.
        svh: (out,) of the columns.

    Returns:
        (out, in), fp16: the transpose, whose rows are what a product reads.

    Raises:
        ValueError: these are no such tensors.
    """
    rate = _rate(trellis, codebook)
    rows, columns = trellis.shape[:2]
    if suh.shape != (TILE * rows,) or svh.shape != (TILE * columns,) or rows % TILES or columns % TILES:
        raise ValueError(
            f"A trellis of {tuple(trellis.shape)} needs multiples of {BLOCK} scales, {TILE * rows} and "
            f"{TILE * columns}, and has {tuple(suh.shape)} and {tuple(svh.shape)}."
        )
    weight = torch.empty(columns, TILE, rows, TILE, dtype=torch.half)
    row_scales = suh.float().view(rows, TILE).T.reshape(1, TILE, rows, 1)
    column_scales = svh.float().view(columns, TILE).T.reshape(TILE, 1, 1, columns)
    step = max(1, CHUNK // (BLOCK * TILE * rows)) * TILES
    for first in range(0, columns, step):
        chunk = slice(first, first + step)
        values = _rotated(_values(trellis[:, chunk], rate, codebook)) * row_scales * column_scales[..., chunk]
        weight[chunk] = values.half().permute(3, 0, 2, 1)
    return weight.view(TILE * columns, TILE * rows)


def _rate(trellis: Tensor, codebook: Codebook) -> int:
    """Bits a weight, in halves."""
    rate, rest = divmod(trellis.shape[-1], TILE // 2)
    rates = itertools.chain(WHOLE_RATES, HALF_RATES if codebook is Codebook.MUL1 else ())
    if trellis.dim() != 3 or trellis.dtype != torch.int16 or rest or rate not in rates:
        raise ValueError(
            f"A trellis of {tuple(trellis.shape)} in {trellis.dtype} has no bitrate that EXL3 knows with the codebook "
            f"{codebook.name}."
        )
    return rate


def _values(trellis: Tensor, rate: int, codebook: Codebook) -> Tensor:
    """T in fp32, as (column and row in a tile, in / 16, out / 16): what lies in a row is computed alike."""
    words = trellis.flatten(0, 1).T.reshape(-1, 2, trellis.shape[0] * trellis.shape[1])
    words = words.flip(1).flatten(0, 1).to(torch.int32) & 0xFFFF  # in the order of their bits
    pairs = (words << 16) | words.roll(-1, 0)
    index, shift = _windows(rate)
    states = (pairs.index_select(0, index) >> shift).bitwise_and_(0xFFFF)
    return numbers(codebook).index_select(0, states.flatten()).view(TILE, TILE, *trellis.shape[:2])


@cache
def _windows(rate: int) -> tuple[Tensor, Tensor]:
    """Where in the ring a state is: the word of 16 bits that it begins in, and how far it is from a pair's low end.

    (256,) and (256, 1), for the weights of a tile column by column. In the ring they lie as in the registers of a
    tensor core (`tensor_core_perm` of the engine's exl3_lib/quantize.py).
    """
    column, row = torch.arange(TILE).repeat_interleave(TILE), torch.arange(TILE).repeat(TILE)
    lane = (column % 8) * 4 + (row % 8) // 2
    position = lane * 8 + column // 8 * 4 + row // 8 * 2 + row % 2
    start = ((position + 1) * rate // 2 - 16) % (TILE * TILE * rate // 2)
    return start // 16, (16 - start % 16).to(torch.int32).unsqueeze(-1)


def _rotated(tiles: Tensor) -> Tensor:
    """H T H, laid out as T: the matrix of 128 is the product of one over the tiles of a block and one within a tile."""
    shape = tiles.shape
    within, among = _hadamard(TILE), _hadamard(TILES)
    x = within @ tiles.view(TILE, -1)  # columns within a tile
    x = within @ x.view(TILE, TILE, -1)  # rows within a tile
    x = among @ x.view(-1, TILES, shape[-1])  # rows of tiles
    return (x.view(-1, TILES) @ among).view(shape)  # columns of tiles


@cache
def _hadamard(size: int) -> Tensor:
    """Symmetric and orthonormal, in Sylvester's order."""
    matrix = torch.full((1, 1), size**-0.5)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def unpacked_signs(packed: Tensor) -> Tensor:
    """Of an older form of suh and svh, one bit a sign in int16: 1 or -1 in fp16 (`LinearEXL3.unpack_bf`)."""
    bits = (packed.unsqueeze(-1) >> torch.arange(16, dtype=torch.int16)) & 1
    return 1 - 2 * bits.flatten().half()


# --- what the engine's `Linear` has in place of its own ---------------------------------------------------------------


def load_exl3(layer: Any, key: str) -> bool:
    """`Linear.load_exl3`: make an unquantised layer of the tensors under `key`, if they are EXL3's.

    What the padding to 128 added is cut off where the layer has none.

    Raises:
        ValueError: some of the tensors are missing, or they do not fit together or the layer.
    """
    # This module is there before the engine is imported.
    from exllamav3.modules.quant import LinearFP16

    if not layer.is_exl3_storage(key):
        if key == layer.key and layer.config.stc.has_tensor(f"{key}.trellis"):
            raise ValueError(f"{key} is damaged. Its trellis has no suh or no svh beside it. Download the model again.")
        return False
    layer.used_alt_key = key == layer.alt_key

    def tensor(name: str) -> Any:
        # At once: one layer's trellis at a time is in memory.
        return layer.config.stc.get_tensor(f"{key}.{name}", torch.device("cpu"), optional=True, no_defer=True)

    def scales(name: str) -> Tensor:
        packed = tensor(name)
        return tensor(f"{name}h") if packed is None else unpacked_signs(packed)

    def marked(codebook: Codebook) -> bool:
        name = f"{key}.{codebook.name.lower()}"
        return layer.config.stc.get_codebook_marker(name, codebook.value) is not None

    codebook = next(filter(marked, (Codebook.MCG, Codebook.MUL1)), Codebook.THREE_INSTRUCTIONS)
    try:
        weight = decode(tensor("trellis"), scales("su"), scales("sv"), codebook)
    except ValueError as error:
        raise ValueError(f"{key} is damaged. {error} Download the model again.") from error
    size = layer.out_features, layer.in_features
    if any(has < needs for has, needs in zip(weight.shape, size, strict=True)):
        raise ValueError(f"{key} is (out, in) {tuple(weight.shape)}, but the model's configuration makes it {size}.")
    weight = weight[: layer.out_features, : layer.in_features].contiguous()
    bias = tensor("bias")
    layer.inner = LinearFP16(
        layer.in_features,
        layer.out_features,
        weight.T,
        bias if bias is None else bias[: layer.out_features],
        layer.in_features,
        layer.out_features,
        0,
        0,
        layer.out_dtype,
        key=layer.key,
    )
    layer.quant_type = LinearFP16.quant_type
    return True


def quant_format_id(layer: Any) -> str | None:
    """`Linear.quant_format_id`: nothing computes with the form that a layer is stored in."""
    return None
