"""EXL3 from the other side: matrices of random weights, as files and as what they stand for.

Written from the engine's CUDA sources, apart from what decodes the format in backends/exllamav3/cpu.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TILE, BLOCK, RING = 16, 128, 256
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
# Bits a weight, and the codebook: those of a model's matrices, in turn. The half exists with one codebook alone.
RATES: tuple[tuple[float, str | None], ...] = ((4, "mcg"), (5, None), (3.5, "mul1"), (6, "mul1"), (3, "mcg"))
# Of these the engine's converter leaves the weights as they are.
UNQUANTISED = ("embed_tokens", "norm", "conv1d", ".gate.", "in_proj_a", "in_proj_b")


@dataclass(frozen=True)
class Matrix:
    """One matrix.

    Attributes:
        tensors: as a file has them, by the last part of their names.
        inner: (in, out), fp32, both padded to a multiple of 128: what the trellis stands for.
        weight: (out, in), fp32: what they stand for.
    """

    tensors: dict[str, Tensor]
    inner: Tensor
    weight: Tensor


@cache
def numbers(codebook: str | None) -> npt.NDArray[np.float16]:
    """What the 65,536 states stand for (codebook.cuh, `decode_3inst`)."""
    states = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        sums = (states * np.uint32(MULTIPLIERS["mul1"])).view(np.uint8).reshape(-1, 4).sum(-1)
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        values: npt.NDArray[np.float64] = (1024 + sums) * factor + offset
        return values.astype(np.float16)
    hashed = states * np.uint32(MULTIPLIERS.get(codebook or "", 89226354))
    if codebook is None:
        hashed += np.uint32(64248484)
    pairs = ((hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return np.add(pairs[:, 0], pairs[:, 1], dtype=np.float16)


def ends(bits: float) -> list[int]:
    """Where each weight's bits end in the ring (frac.cu, `frac_s`)."""
    widths = [int(bits) + (bits % 1 > 0 and place % 2) for place in range(RING)]
    return list(itertools.accumulate(widths))


@cache
def places() -> list[int]:
    """Of the weights in the order of the ring, the place in a tile row by row (reconstruct.cu)."""
    order = []
    for thread in range(32):
        row, column = thread % 4 * 2, thread // 4
        for right in (0, 8):
            for down in (0, 1, 8, 9):
                order.append((row + down) * TILE + column + right)
    return order


def states_in(rings: Tensor, bits: float) -> Tensor:
    """The 16 bits that end with each weight's own: (tiles, 256), of rings (tiles, 256 * bits) of single bits."""
    states = torch.zeros(len(rings), RING, dtype=torch.int32)
    last = torch.tensor(ends(bits)) - 1
    for back in range(16):
        states |= rings[:, last - back].to(torch.int32) << back
    return states


def rings_of(states: Tensor, bits: float) -> Tensor:
    """The single bits of states (tiles, 256), in the order of the ring: (tiles, 256 * bits)."""
    widths = np.diff([0, *ends(bits)])
    return torch.cat(
        [(states[:, place, None] >> torch.arange(width - 1, -1, -1)) & 1 for place, width in enumerate(widths)], 1
    ).to(torch.uint8)


def packed(rings: Tensor) -> Tensor:
    """As int16: the highest bit of a word of 32 comes first (pack.cu)."""
    words = np.packbits(rings.numpy(), axis=1).view(">u4").astype("<u4")
    return torch.from_numpy(words.view(np.int16))


def hadamard(x: Tensor) -> Tensor:
    """H x H in blocks of 128, orthonormal."""
    for _ in range(2):
        x = x.T
        for stride in (1, 2, 4, 8, 16, 32, 64):
            a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
            x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x / BLOCK


def random_matrix(
    shape: Sequence[int],
    bits: float,
    codebook: str | None,
    *,
    std: float = 1.0,
    zeros: Tensor | None = None,
    seed: int = 0,
) -> Matrix:
    """Random weights.

    Args:
        shape: (out, in).
        std: of the weights, about.
        zeros: (out,) true where a row is all zero.
    """
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = (-(-size // BLOCK) * BLOCK for size in shape)
    suh, svh = (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1 for size in (inputs, outputs))
    svh *= std / float(numbers(codebook).astype(np.float32).std())
    if zeros is not None:
        svh[: len(zeros)][zeros] = 0.0
    suh, svh = suh.half(), svh.half()

    rows, columns = inputs // TILE, outputs // TILE
    rings = torch.randint(0, 2, (rows * columns, int(RING * bits)), generator=generator, dtype=torch.uint8)
    tiles = torch.empty(rows * columns, RING)
    tiles[:, places()] = torch.from_numpy(numbers(codebook)).float()[states_in(rings, bits)]
    inner = tiles.view(rows, columns, TILE, TILE).transpose(1, 2).reshape(inputs, outputs)
    weight = suh.float().unsqueeze(-1) * hadamard(inner) * svh.float()

    tensors = {"trellis": packed(rings).view(rows, columns, -1), "suh": suh, "svh": svh}
    if codebook is not None:
        tensors[codebook] = torch.from_numpy(np.array(MULTIPLIERS[codebook], np.uint32).view(np.int32))
    return Matrix(tensors, inner, weight.T[: shape[0], : shape[1]].contiguous())


def make_exl3(directory: Path, source: Path) -> Path:
    """The model of a folder with random weights in EXL3, and in `decoded` the same, unquantised."""
    decoded = directory / "decoded"
    shutil.copytree(source, directory)
    shutil.copytree(source, decoded)
    weights = load_file(source / "model.safetensors")
    rates = itertools.cycle(RATES)
    written: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(weights.items()):
        if weight.dim() != 2 or any(part in name for part in UNQUANTISED):
            written[name] = weight
            continue
        bits, codebook = next(rates)
        zeros = (weight == 0).all(1)
        matrix = random_matrix(weight.shape, bits, codebook, std=float(weight.float().std()), zeros=zeros, seed=number)
        written |= {f"{name.removesuffix('weight')}{last}": tensor for last, tensor in matrix.tensors.items()}
        weights[name] = matrix.weight.half()
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, decoded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "exl3", "version": "0.0.1", "bits": 4.3, "head_bits": 6}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory
