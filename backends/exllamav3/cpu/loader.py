"""Reading weights: the extension's safetensors reader, `stloader.cpp`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from backends.exllamav3.cpu.memory import buffer_at, tensor_at

__all__ = ["stloader_close_file", "stloader_deferred_batch", "stloader_open_file", "stloader_read"]

# Bits of the flags column (`StloaderBatchColumn` in the engine's stloader.h). The one between them, 2, marks weights in
# fp32 that are to become fp16. They are read as they are; the engine narrows them when it copies them to their place.
BF16_TO_FP16 = 1
CUDA_DESTINATION = 4

_files: dict[int, BinaryIO] = {}
_handles = itertools.count(1)


def stloader_open_file(filename: str) -> int:
    """Open a file for reading; the handle is a number of ours."""
    handle = next(_handles)
    _files[handle] = open(filename, "rb", buffering=0)  # noqa: SIM115 (closed by handle)
    return handle


def stloader_close_file(handle: int) -> None:
    _files.pop(handle).close()


def stloader_read(handle: int, offset: int, size: int, target: Tensor) -> None:
    """Read `size` bytes from `offset` into a contiguous tensor of any type.

    Raises:
        ValueError: the tensor is too small.
        OSError: the file ends before.
    """
    if size > target.nbytes:
        raise ValueError(f"{size} bytes do not fit a tensor of {target.nbytes}")
    _read_into(handle, offset, buffer_at(target.data_ptr(), size))


def stloader_deferred_batch(handles: Sequence[int], loads: Tensor, max_chunk_size: int) -> None:
    """Fill tensors that were allocated earlier.

    Args:
        handles: of the files.
        loads: (n, 7) int64, one row a read: index into `handles`, offset, bytes on disk, address, bytes in memory,
            flags, device.
        max_chunk_size: bytes the extension reads at a time; a load is read in one piece here.

    Raises:
        ValueError: a destination is too small, or on a CUDA device.
        OSError: a file ends before.
    """
    for file_index, offset, size, address, capacity, flags, _ in loads.tolist():
        if flags & CUDA_DESTINATION:
            raise ValueError("A weight is to be loaded to a CUDA device, but the engine runs on the CPU kernels.")
        if size > capacity:
            raise ValueError(f"A weight of {size} bytes does not fit {capacity} bytes in memory.")
        if not size:
            continue
        _read_into(handles[file_index], offset, buffer_at(address, size))
        if flags & BF16_TO_FP16:
            source = tensor_at(address, torch.bfloat16, [size // 2]).clone()
            tensor_at(address, torch.half, [size // 2]).copy_(source)


def _read_into(handle: int, offset: int, target: memoryview) -> None:
    file = _files[handle]
    file.seek(offset)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]  # an unbuffered file has it
        if not count:
            raise OSError(f"{file.name} ends {len(target) - done} bytes before a tensor does; download it again.")
        done += count
