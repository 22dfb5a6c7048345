"""How much torch's operators ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """While it is entered, notes the number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no types
        self.elements: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest(function: Callable[..., object], *arguments: Any, **options: Any) -> int:
    """Elements of the largest tensor that an operator returns during a call of a function."""
    mode = LargestTensor()
    with torch.inference_mode(), mode:
        function(*arguments, **options)
    return mode.elements
