from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

from backends.exllamav3.cpu.stand_ins import importable_triton, torch_facade


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="there is a real Triton")
def test_triton_is_there_inside_the_block_only() -> None:
    with importable_triton():
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")

        def kernel(x: object) -> None:
            pass

        plain = triton.jit(kernel)
        tuned = triton.autotune(configs=[triton.Config({})], key=["n"])(triton.jit(do_not_specialize=["n"])(kernel))
        assert language.constexpr is not None
    assert "triton" not in sys.modules
    assert importlib.util.find_spec("triton") is None
    for function in (plain, tuned):
        with pytest.raises(RuntimeError, match="no kernel, a Triton kernel"):
            function[(1,)](None)


def test_a_real_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = object()
    monkeypatch.setitem(sys.modules, "triton", real)
    with importable_triton():
        assert sys.modules["triton"] is real
    assert sys.modules["triton"] is real


def test_the_facade_has_torch_without_pinned_memory() -> None:
    facade = torch_facade()
    assert facade.Tensor is torch.Tensor
    assert not facade.zeros(2, pin_memory=True).is_pinned()
    assert torch.equal(facade.zeros_like(torch.ones(2), pin_memory=True), torch.zeros(2))


def test_the_facade_has_a_cuda_that_does_nothing() -> None:
    cuda = torch_facade().cuda
    assert not cuda.is_available()
    assert cuda.device_count() == 0
    cuda.synchronize(torch.device("cpu"))
    with cuda.device(0), cuda.stream(None):
        pass


def test_replacements_do_not_reach_torch_itself() -> None:
    before = torch.bfloat16, torch.cuda, torch.empty
    assert torch_facade(bfloat16=torch.float).bfloat16 == torch.float
    assert before == (torch.bfloat16, torch.cuda, torch.empty)
