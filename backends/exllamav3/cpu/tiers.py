"""The tiers of the key/value cache in RAM and on disk, which the engine builds for CUDA tensors.

What is copied on the CPU is there when the copy returns: nothing needs pinned memory, and nobody has to wait for an
event. The writer and reader threads of the disk tier move bytes and at most one page's tokens, too little for torch to
start an OpenMP pool in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["cuda_host_register", "cuda_host_unregister"]

CUDA = torch.device("cuda")


def cuda_host_register(address: int, size: int, flags: int) -> None:
    """There is no driver that would have to know of the memory."""


def cuda_host_unregister(address: int) -> None:
    """See `cuda_host_register`."""


class _OnCuda:
    """A tensor, as if it were on a GPU."""

    device = CUDA

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, page: int) -> Tensor:
        return self.tensor[page]


def page_cache_init(original: Callable[..., None]) -> Callable[..., None]:
    """The engine insists on a cache on CUDA: it is shown one, and given the tensors themselves afterwards."""

    @wraps(original)
    def init(self: Any, caches: Sequence[Any], max_size: int) -> None:
        original(self, [_shown(cache) for cache in caches], max_size)
        self.segments = [(shown.tensor, *place) for shown, *place in self.segments]
        self._devices = []  # those on whose streams copies are waited for

    return init


def _shown(cache: Any) -> SimpleNamespace:
    return SimpleNamespace(model=cache.model, layers={key: _LayerOnCuda(layer) for key, layer in cache.layers.items()})


class _LayerOnCuda:
    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def get_tensors(self) -> list[_OnCuda | None]:
        return [None if tensor is None else _OnCuda(tensor) for tensor in self._layer.get_tensors()]
