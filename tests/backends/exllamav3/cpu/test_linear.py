from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.linear import hgemm, linear_forward


@dataclass
class Layer:
    """What `linear_forward` uses of the engine's LinearFP16."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    out_dtype: torch.dtype | None = None


def make_layer(with_bias: bool = True) -> Layer:
    return Layer(torch.randn(24, 10).half(), torch.randn(10).half() if with_bias else None, 10)


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_and_bias(rows: int, with_bias: bool) -> None:
    layer, x = make_layer(with_bias), torch.randn(1, rows, 24).half()
    expected = x.double() @ layer.weight.double() + (0 if layer.bias is None else layer.bias.double())
    out = linear_forward(layer, x, {}, torch.float)
    assert out.shape == (1, rows, 10)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-3)


def test_output_type_is_the_callers_or_the_layers_or_fp16() -> None:
    layer, x = make_layer(), torch.randn(3, 24)
    assert linear_forward(layer, x, {}).dtype == torch.half
    layer.out_dtype = torch.float
    assert linear_forward(layer, x, {}).dtype == torch.float
    assert linear_forward(layer, x, {}, torch.bfloat16).dtype == torch.bfloat16


def test_the_weight_keeps_its_shape_and_values() -> None:
    layer, x = make_layer(), torch.randn(1, 24).half()
    before = layer.weight.clone()
    linear_forward(layer, x, {})
    linear_forward(layer, x.expand(5, 24), {})
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_new_weight_is_noticed(rows: int) -> None:
    layer, x = make_layer(False), torch.ones(rows, 24).half()
    linear_forward(layer, x, {})
    layer.weight = torch.zeros(24, 10).half()
    assert not linear_forward(layer, x, {}).any()


def test_hgemm() -> None:
    a, b, c = torch.randn(3, 8).half(), torch.randn(8, 5).half(), torch.empty(3, 5)
    hgemm(a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-4)
