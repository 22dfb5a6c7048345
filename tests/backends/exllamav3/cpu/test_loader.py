from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.exllamav3.cpu import loader
from backends.exllamav3.engine import DEVICE
from tests.logits import engine_logits, prompt

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


def test_weights_in_bf16_become_fp16_in_their_place(handle: int) -> None:
    target = torch.empty(4, dtype=torch.half)
    deferred(handle, 24, 8, target, loader.BF16_TO_FP16)
    assert torch.equal(target, VALUES.bfloat16().half())


def test_weights_in_fp32_stay_so_as_the_engine_narrows_them_itself(handle: int) -> None:
    """It has them read into a tensor in fp32, which it copies to the one in fp16."""
    target = torch.empty(4)
    deferred(handle, 8, 16, target, 2)
    assert torch.equal(target, VALUES)


def test_weights_in_fp16_are_read_as_they_are(handle: int) -> None:
    target = torch.empty(4, dtype=torch.half)
    deferred(handle, 32, 8, target, 0)
    assert torch.equal(target, VALUES.half())


def test_a_deferred_read_does_not_leave_its_tensor(handle: int) -> None:
    target = torch.zeros(4)
    with pytest.raises(ValueError, match="16 bytes does not fit 8 bytes"):
        deferred(handle, 8, 16, target[:2], 0)
    assert not target.any()


def test_an_empty_tensor_needs_nothing(handle: int) -> None:
    deferred(handle, 8, 0, torch.empty(0), loader.BF16_TO_FP16)


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


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU kernels")
def test_a_model_in_fp32_computes_what_it_does_in_bf16(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "wide"
    shutil.copytree(tiny_llama, directory)
    weights = load_file(directory / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    save_file({name: weight.float() for name, weight in weights.items()}, directory / "model.safetensors")
    ids = prompt(20)
    torch.testing.assert_close(engine_logits(directory, ids), engine_logits(tiny_llama, ids), atol=1e-3, rtol=1e-3)
