"""Tensors over memory that the engine names by address."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor


def buffer_at(address: int, size: int) -> memoryview:
    """`size` writable bytes at an address."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """A view of memory that something else keeps alive.

    Args:
        strides: in elements; None means contiguous.
    """
    if strides is None:
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    flat = torch.frombuffer(buffer_at(address, count * dtype.itemsize), dtype=dtype, count=count)
    return flat.as_strided(tuple(shape), tuple(strides))


def return_freed() -> None:
    """Give freed memory back to the system. glibc keeps much of what packing weights needed for a moment."""
    if sys.platform == "linux":
        # By way of Python's own library, as nothing else is loaded. Other C libraries have none.
        trim = getattr(ctypes.pythonapi, "malloc_trim", None)
        if trim is not None:
            trim(0)
