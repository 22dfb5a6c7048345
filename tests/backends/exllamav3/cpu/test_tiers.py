from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import backends.exllamav3.engine  # noqa: F401  (installs the kernels)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU")

PAGES = 4


class Layer:
    """A cache layer of one tensor; others have more, or none for what they do not store."""

    def __init__(self, *page_shape: int) -> None:
        self.tensor = torch.randn(PAGES, *page_shape)

    def get_tensors(self) -> list[Tensor | None]:
        return [self.tensor, None]


def page(index: int) -> SimpleNamespace:
    return SimpleNamespace(
        page_index=index,
        phash=bytes([index] * 16),
        prev_hash=None,
        sequence=torch.full((1, 256), index),
        persistable=True,
    )


@pytest.fixture
def layers() -> list[Layer]:
    return [Layer(256, 2, 8), Layer(256, 1, 4)]


def page_cache(layers: list[Layer], max_size: int) -> Any:
    module = importlib.import_module("exllamav3.generator.cpu_cache")
    caches = [SimpleNamespace(model=SimpleNamespace(loaded_tp=False), layers={0: layer}) for layer in layers]
    return module.CPUPageCache(caches, max_size)


def test_pages_go_to_ram_and_come_back(layers: list[Layer], capfd: pytest.CaptureFixture[str]) -> None:
    tier = page_cache(layers, max_size=2**20)
    before = [layer.tensor.clone() for layer in layers]
    tier.store(page(2), serial=1)
    for layer in layers:
        layer.tensor.zero_()
    entry = tier.fetch(page(2).phash, page_index=3, serial=2)
    assert entry["tokens"].tolist() == [[2] * 256]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer.tensor[3], old[2])
        assert not layer.tensor[:3].any()
    tier.close()
    assert capfd.readouterr().out == ""  # as of memory that could not be pinned


def test_a_tier_that_is_too_small_is_refused_as_on_a_gpu(layers: list[Layer]) -> None:
    tier = page_cache(layers, max_size=2**20)
    assert tier.slot_size == 256 * (2 * 8 + 4) * 4
    with pytest.raises(AssertionError, match="smaller than two pages"):
        page_cache(layers, max_size=2 * tier.slot_size - 1)


def test_a_cache_layer_tells_the_size_that_it_will_have() -> None:
    cache_layer = importlib.import_module("exllamav3.cache.fp16").CacheLayer_fp16
    layer = cache_layer(None, SimpleNamespace(num_kv_heads=2, head_dim=32), 0, 1024)
    size = layer.storage_size()
    layer.alloc(torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in layer.get_tensors()) == size
