from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import loader

VALUES = torch.tensor([1.5, -2.25, 0.1, 70000.0])


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[int]:
    """Eight bytes of something else, then the values in fp32, bf16 and fp16."""
    path = tmp_path / "weights"
    parts = [VALUES.to(dtype).view(torch.uint8) for dtype in (torch.float, torch.bfloat16, torch.half)]
    path.write_bytes(b"headless" + b"".join(bytes(part.tolist()) for part in parts))
    handle = loader.stloader_open_file(str(path))
    yield handle
    loader.stloader_close_file(handle)


def deferred(handle: int, offset: int, size: int, target: Tensor, flags: int) -> None:
    row = [0, offset, size, target.data_ptr(), target.nbytes, flags, -1]
    loader.stloader_deferred_batch([handle], torch.tensor([row]), 1 << 20)


def test_a_tensor_is_read_from_its_offset(handle: int) -> None:
    target = torch.empty(4)
    loader.stloader_read(handle, 8, 16, target)
    assert torch.equal(target, VALUES)
    loader.stloader_read(handle, 12, 4, target)
    assert target[0] == VALUES[1]


def test_more_than_a_tensor_holds_is_refused(handle: int) -> None:
    with pytest.raises(ValueError, match="16 bytes do not fit"):
        loader.stloader_read(handle, 8, 16, torch.empty(2))


@pytest.mark.parametrize(
    ("offset", "size", "flags", "stored"),
    [
        (8, 16, loader.FP32_TO_FP16, torch.float),
        (24, 8, loader.BF16_TO_FP16, torch.bfloat16),
        (32, 8, 0, torch.half),
    ],
)
def test_deferred_reads_convert_to_fp16(handle: int, offset: int, size: int, flags: int, stored: torch.dtype) -> None:
    target = torch.empty(4, dtype=torch.half)
    deferred(handle, offset, size, target, flags)
    assert torch.equal(target, VALUES.to(stored).half())


def test_a_cuda_destination_is_refused(handle: int) -> None:
    with pytest.raises(ValueError, match="CUDA"):
        deferred(handle, 8, 16, torch.empty(4), loader.CUDA_DESTINATION)


def test_a_file_that_ends_early_is_named(handle: int) -> None:
    with pytest.raises(OSError, match=r"weights ends 24 bytes before .* download it again"):
        loader.stloader_read(handle, 8, 56, torch.empty(14))


def test_a_closed_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    handle = loader.stloader_open_file(str(tmp_path / "weights"))
    loader.stloader_close_file(handle)
    with pytest.raises(KeyError):
        loader.stloader_read(handle, 0, 4, torch.empty(1))
