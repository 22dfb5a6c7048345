"""What a model takes of the memory of its device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from backends.exllamav3.engine import DEVICE, Cache
from backends.exllamav3.model_files import WEIGHTS

# Bytes of memory for each byte of a file with weights. The engine keeps them as they are stored, or halves those in
# fp32; the CPU kernels put an fp32 copy beside each matrix in fp16 (cpu/linear.py).
WEIGHT_COPIES: Final = 3 if DEVICE == "cpu" else 1


def estimated_bytes(directories: Iterable[Path], caches: Iterable[Cache]) -> int:
    """Memory for weights and caches, which need not be loaded; what the engine works in comes on top.

    A cache allocates what `storage_size()` of its layers says (exllamav3, cache/cache.py and the states in modules/).

    Args:
        directories: of the model, and of the drafter if it is one of its own.
        caches: theirs.
    """
    weights = sum(path.stat().st_size for directory in directories for path in directory.glob(WEIGHTS))
    layers = [layer for cache in caches for layer in (*cache.layers.values(), *cache.recurrent_layers.values())]
    return weights * WEIGHT_COPIES + sum(int(layer.storage_size()) for layer in layers)
