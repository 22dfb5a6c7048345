"""The stand-in for `exllamav3_ext`, the engine's compiled extension."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from backends.exllamav3.cpu import (
    activations,
    delta_net,
    drafting,
    linear,
    loader,
    mamba2,
    matching,
    norms,
    paging,
    penalties,
    quantised_cache,
    rewind,
    rope,
    routing,
    sampling,
    sparse_attention,
    tiers,
)

FAMILIES: tuple[ModuleType, ...] = (
    activations,
    delta_net,
    drafting,
    linear,
    loader,
    mamba2,
    matching,
    norms,
    paging,
    penalties,
    quantised_cache,
    rewind,
    rope,
    routing,
    sampling,
    sparse_attention,
    tiers,
)


class MissingKernel(AttributeError):
    """The engine asks for a function of its extension that has no CPU version."""


class Extension:
    """All kernels as attributes. Optional features of the extension, whose names begin with HAS_, are absent."""

    def __init__(self) -> None:
        for family in FAMILIES:
            for name in family.__all__:
                setattr(self, name, getattr(family, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("HAS_"):
            return False
        raise MissingKernel(f"The CPU kernels have no {name}, which this model or this setting needs. Use a CUDA GPU.")
