from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import linear
from backends.exllamav3.cpu.linear import PackedMatrix, PlainMatrix, hgemm, linear_forward, with_matrix


@with_matrix
@dataclass
class Layer:
    """What `linear_forward` uses of the engine's LinearFP16."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    out_dtype: torch.dtype | None = None
    in_features: int = 24
    matrix: Any = field(init=False, repr=False)


@dataclass
class Module:
    inner: Layer | None


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


@pytest.mark.parametrize("form", [PackedMatrix, PlainMatrix])
@pytest.mark.parametrize("size", [(24, 10), (7, 33), (64, 3)])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_both_forms_multiply_and_give_the_weight_back(
    form: type[PackedMatrix | PlainMatrix], size: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "BLOCK", 128)  # several blocks
    weight, x = torch.randn(size).half(), torch.randn(2, rows, size[0])
    matrix = form(weight)
    tolerance = 1e-5 if form is PackedMatrix else 2e-2
    torch.testing.assert_close(matrix.product(x), x @ weight.float(), atol=tolerance, rtol=1e-3)
    assert torch.equal(matrix.weight(), weight)
    assert matrix.nbytes >= weight.nbytes


def test_widened_products_of_other_layers_do_not_disturb_each_other() -> None:
    weights = [torch.randn(size).half() for size in ((8, 12), (12, 4), (8, 12))]
    matrices, x = [PlainMatrix(weight) for weight in weights], torch.randn(5, 8)
    first, third = matrices[0].product(x), matrices[2].product(x)
    torch.testing.assert_close(matrices[1].product(first), x @ weights[0].float() @ weights[1].float())
    torch.testing.assert_close(third, x @ weights[2].float())


def test_a_weight_is_held_in_one_form() -> None:
    layer = make_layer()
    weight = weakref.ref(layer.weight)
    linear_forward(layer, torch.ones(1, 24), {})
    assert weight() is None


def test_small_layers_are_left_as_they_are_until_they_are_used() -> None:
    layers = [make_layer(), make_layer()]
    layers[1].in_features = 24 * linear.SMALL
    linear.prepare([Module(None), *map(Module, layers)])
    assert [layer.matrix is None for layer in layers] == [True, False]


def test_output_type_is_the_callers_or_the_layers_or_fp32() -> None:
    layer, x = make_layer(), torch.randn(3, 24)
    assert linear_forward(layer, x, {}).dtype == torch.float
    layer.out_dtype = torch.half
    assert linear_forward(layer, x, {}).dtype == torch.half
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
