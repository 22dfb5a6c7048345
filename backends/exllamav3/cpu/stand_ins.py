"""What the engine finds in place of Triton while it is imported, and in place of `torch` afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

TRITON_MODULES = ("triton", "triton.language", "triton.compiler", "triton.runtime", "triton.backends")
FACTORIES = ("empty", "empty_like", "empty_strided", "full", "ones", "tensor", "zeros", "zeros_like")


class _Anything:
    """Takes every attribute, call and subscript, so that a module full of Triton kernels can be defined."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: object) -> Any:
        return _Anything()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _Anything()


class _Kernel:
    """A function that `triton.jit` has decorated: it can be held, not run."""

    def __init__(self, function: Any) -> None:
        self.__name__: str = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"The CPU kernels have no {self.__name__}, a Triton kernel. Use a CUDA GPU.")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self[None]


def _decorator(*arguments: Any, **options: Any) -> Callable[[Any], _Kernel]:
    return _Kernel


def _jit(function: Any = None, **options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


class _TritonModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a package to the import system)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


@contextlib.contextmanager
def importable_triton() -> Iterator[None]:
    """Make `import triton` succeed inside the block, unless there is a real one.

    It must not stay: torch and transformers take a module of that name for a working Triton.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        yield
        return
    modules = {name: _TritonModule(name) for name in TRITON_MODULES}
    vars(modules["triton"]).update(
        jit=_jit, autotune=_decorator, heuristics=_decorator, language=modules["triton.language"]
    )
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def torch_facade(**replacements: Any) -> ModuleType:
    """A module with the contents of `torch`, but no pinned memory and a `cuda` whose synchronisation does nothing.

    Args:
        replacements: further names to replace.
    """
    facade = ModuleType("torch")
    vars(facade).update(vars(torch))
    vars(facade).update({name: _unpinned(getattr(torch, name)) for name in FACTORIES})
    vars(facade).update(cuda=_cuda_without_devices(), **replacements)
    return facade


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return factory(*arguments, **options)

    return create


def _cuda_without_devices() -> ModuleType:
    cuda = ModuleType("torch.cuda")
    vars(cuda).update(vars(torch.cuda))
    vars(cuda).update(
        is_available=lambda: False,
        device_count=lambda: 0,
        init=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        device=_no_context,
        stream=_no_context,
    )
    return cuda


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _no_context(*arguments: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
