"""What a model takes of the memory of its device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from backends.exllamav3.engine import DEVICE, Cache, check_host_memory
from backends.exllamav3.model_files import WEIGHTS, read_tensors
from common.errors import ModelLoadFailed

# A word of a trellis, (in / 16, out / 16, words of a tile), is of 16 bits, as is a weight once it is decoded.
TILE_WEIGHTS: Final = 16 * 16
WORD_BYTES: Final = 2


def estimated_bytes(directories: Iterable[Path], caches: Iterable[Cache]) -> int:
    """Memory for weights and caches, which need not be loaded; what the engine works in comes on top.

    A cache allocates what `storage_size()` of its layers says (exllamav3, cache/cache.py and the states in modules/).

    Args:
        directories: of the model, and of the drafter if it is one of its own.
        caches: theirs.
    """
    weights = sum(_in_memory(path) for directory in directories for path in directory.glob(WEIGHTS))
    layers = [layer for cache in caches for layer in (*cache.layers.values(), *cache.recurrent_layers.values())]
    return weights + sum(int(layer.storage_size()) for layer in layers)


def _in_memory(path: Path) -> int:
    """Bytes of the weights in a file.

    On the CPU, where too much of it has the system kill the process: those in EXL3 are decoded (cpu/exl3.py), and those
    in fp32 halved when they are loaded.
    """
    size = path.stat().st_size
    if DEVICE == "cpu":
        for name, tensor in read_tensors(path).items():
            match tensor["shape"]:
                case [rows, columns, words] if name.endswith(".trellis"):
                    size += rows * columns * (TILE_WEIGHTS - words) * WORD_BYTES
                case shape if tensor["dtype"] == "F32":
                    size -= math.prod(shape) * WORD_BYTES
    return size


def check_memory(name: str, needed: int) -> None:
    """Raise ModelLoadFailed for a model that the memory of a machine without a GPU has no room for.

    Args:
        needed: bytes, see `estimated_bytes()`.
    """
    try:
        check_host_memory(needed, name)
    except RuntimeError as error:
        raise ModelLoadFailed(f"{error} Or load the model with a smaller cache_size or max_seq_len.") from error
