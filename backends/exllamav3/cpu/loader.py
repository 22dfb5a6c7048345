"""Reading weights: the extension's safetensors reader."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from backends.exllamav3.cpu.memory import buffer_at, tensor_at

__all__ = ["stloader_close_file", "stloader_deferred_batch", "stloader_open_file", "stloader_read"]

# Bits of the flags column (`StloaderBatchColumn` in the engine's stloader.h).
BF16_TO_FP16 = 1
FP32_TO_FP16 = 2
CUDA_DESTINATION = 4

_files: dict[int, BinaryIO] = {}
_handles = itertools.count(1)


def stloader_open_file(filename: str) -> int:
    handle = next(_handles)
    _files[handle] = open(filename, "rb", buffering=0)  # noqa: SIM115 (closed by handle)
    return handle


def stloader_close_file(handle: int) -> None:
    _files.pop(handle).close()


def stloader_read(handle: int, offset: int, size: int, target: Tensor) -> None:
    """Read `size` bytes from `offset` into a contiguous tensor."""
    if size > target.nbytes:
        raise ValueError(f"{size} bytes do not fit a tensor of {target.nbytes}")
    _read_into(handle, offset, buffer_at(target.data_ptr(), size))


def stloader_deferred_batch(handles: Sequence[int], loads: Tensor, max_chunk_size: int) -> None:
    """Fill tensors that were allocated earlier.

    Args:
        loads: one row a read: index into `handles`, offset, bytes on disk, address, bytes in memory, flags, device.
        max_chunk_size: bytes the extension reads at a time; a load is read in one piece here.
    """
    for file_index, offset, size, address, _, flags, _ in loads.tolist():
        if flags & CUDA_DESTINATION:
            raise ValueError("A weight is to be loaded to a CUDA device, but the engine runs on the CPU kernels.")
        handle = handles[file_index]
        if flags & FP32_TO_FP16:
            source = torch.empty(size // 4, dtype=torch.float)
            stloader_read(handle, offset, size, source)
            tensor_at(address, torch.half, [size // 4]).copy_(source)
            continue
        _read_into(handle, offset, buffer_at(address, size))
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
