from __future__ import annotations

import weakref
from collections.abc import Iterator
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


class Attention:
    def __init__(self, *layers: Layer) -> None:
        self.q_proj, self.k_proj, self.v_proj = map(Module, layers)

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self.q_proj, self.k_proj, self.v_proj))


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


def joined_layers(monkeypatch: pytest.MonkeyPatch, *outputs: int) -> tuple[list[Layer], list[Tensor]]:
    """Query, key and value of an attention, and their weights."""
    monkeypatch.setattr(linear, "SMALL", 1)
    layers = [Layer(torch.randn(24, size).half(), torch.randn(size).half(), size) for size in outputs]
    weights = [layer.weight.clone() for layer in layers]
    linear.prepare(Attention(*layers))
    return layers, weights


def with_bias_of(layer: Layer, product: Tensor) -> Tensor:
    return product if layer.bias is None else product + layer.bias


@pytest.mark.parametrize("dtype", [torch.half, torch.float])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("has_fbgemm", [True, False])
def test_layers_with_the_same_input_share_a_matrix(
    rows: int, dtype: torch.dtype, has_fbgemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "HAS_FBGEMM", has_fbgemm and linear.HAS_FBGEMM)
    layers, weights = joined_layers(monkeypatch, 10, 6, 33)
    for _ in range(2):
        x = torch.randn(1, rows, 24).to(dtype)
        for layer, weight in zip(layers, weights, strict=True):
            expected = with_bias_of(layer, x.float() @ weight.float())
            torch.testing.assert_close(linear_forward(layer, x, {}), expected, atol=2e-2, rtol=2e-3)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_they_are_multiplied_by_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = joined_layers(monkeypatch, 10, 6, 33)
    form = type(layers[0].matrix._joined._whole)
    calls, original = [], form.product

    def product(matrix: Any, x: Tensor) -> Any:
        calls.append(x)
        return original(matrix, x)

    monkeypatch.setattr(form, "product", product)
    x = torch.randn(1, 24)
    for layer in layers:
        linear_forward(layer, x, {})
    assert len(calls) == 1


def test_a_layer_that_asks_again_does_not_get_the_old_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = joined_layers(monkeypatch, 10, 6, 33)
    x = torch.randn(1, 24)
    before = linear_forward(layers[0], x, {})
    x *= 2
    assert not torch.equal(linear_forward(layers[0], x, {}), before)


def test_nothing_is_kept_once_each_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = joined_layers(monkeypatch, 10, 6, 33)
    x = torch.randn(1, 24)
    kept = weakref.ref(x)
    for layer in layers:
        linear_forward(layer, x, {})
    del x
    assert kept() is None


def test_one_of_them_can_have_a_new_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, weights = joined_layers(monkeypatch, 10, 6, 33)
    layers[1].weight = torch.zeros(24, 6).half()
    x = torch.randn(1, 24)
    torch.testing.assert_close(linear_forward(layers[1], x, {}), with_bias_of(layers[1], torch.zeros(1, 6)))
    for layer, weight in ((layers[0], weights[0]), (layers[2], weights[2])):
        torch.testing.assert_close(linear_forward(layer, x, {}), with_bias_of(layer, x @ weight.float()))


def test_layers_with_other_inputs_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALL", 1)
    layers = [Layer(torch.randn(size, 10).half(), None, 10) for size in (24, 24, 8)]
    linear.prepare(Attention(*layers))
    assert not any(isinstance(layer.matrix, linear.JoinedPart) for layer in layers)


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
