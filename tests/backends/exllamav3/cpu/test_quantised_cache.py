from __future__ import annotations

import importlib
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import backends.exllamav3.engine  # noqa: F401  (installs the kernels)
from backends.exllamav3.cpu.quantised_cache import (
    dequant_cache_cont,
    dequant_cache_paged,
    dequantise,
    quant_cache_cont,
    quant_cache_paged,
    quantise,
)
from tests.logits import engine_logits, prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU")

PAGE, HEADS, DIM = 256, 2, 64
GROUPS = HEADS * DIM // 32
every_width = pytest.mark.parametrize("bits", range(2, 9))


# --- one group, value by value as q_cache_kernels.cuh has it ----------------------------------------------------------


def fp32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def rotated(values: list[float]) -> list[float]:
    for stride in (1, 2, 4, 8, 16):
        values = [
            fp32(values[i ^ stride] - values[i]) if i & stride else fp32(values[i] + values[i ^ stride])
            for i in range(32)
        ]
    return values


def packed(values: list[float], bits: int) -> tuple[list[int], float]:
    """Words and the scale, not yet rounded to fp16."""
    values = [fp32(value * fp32(1 / math.sqrt(32))) for value in rotated(values)]
    scale = fp32(max(map(abs, values)) + fp32(1e-10))
    inverse, half = fp32(1 / scale), 1 << (bits - 1)
    levels = [max(min(math.floor(fp32(fp32(value * inverse) * half + half)), 2 * half - 1), 0) for value in values]
    words, below = [], bits
    for width in (8, 4, 2, 1):
        if bits & width:
            below -= width
            plane = sum((level >> below & (1 << width) - 1) << width * place for place, level in enumerate(levels))
            words += [plane >> 32 * word & 0xFFFFFFFF for word in range(width)]
    return words, scale


def unpacked(words: list[int], scale: float, bits: int) -> list[float]:
    levels, begin = [0] * 32, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            plane = sum(word << 32 * place for place, word in enumerate(words[begin : begin + width]))
            levels = [level << width | plane >> width * i & (1 << width) - 1 for i, level in enumerate(levels)]
            begin += width
    half = 1 << (bits - 1)
    return rotated([(level - half + 0.5) * scale / half / math.sqrt(32) for level in levels])


@every_width
def test_groups_are_packed_as_in_the_cuda_source(bits: int) -> None:
    x = torch.randn(6, 32) * torch.tensor([1.0, 1e-3, 100.0, 1.0, 1.0, 0.0]).view(-1, 1)
    x[3, 5] = 50.0  # one value far from the others
    x[4] = 1.0  # all in one place after the rotation
    x = x.half()
    words, scales = quantise(x, bits)
    assert words.shape == (6, bits)
    assert scales.shape == (6, 1)
    for row in range(len(x)):
        expected, scale = packed(x[row].tolist(), bits)
        assert [word & 0xFFFFFFFF for word in words[row].tolist()] == expected
        assert scales[row].item() == torch.tensor(scale).half().item()
        values = torch.tensor(unpacked(expected, scales[row].item(), bits))
        torch.testing.assert_close(dequantise(words, scales)[row], values, atol=1e-6 * scale, rtol=1e-5)


@every_width
def test_what_comes_back_is_off_by_half_an_interval_at_most(bits: int) -> None:
    """By its norm, which the rotation keeps: values themselves may be off by more."""
    x = torch.randn(500, 4 * 32)
    words, scales = quantise(x, bits)
    error = (dequantise(words, scales) - x).unflatten(-1, (4, 32)).norm(dim=-1) / math.sqrt(32)
    most = scales.float() * (2.0**-bits + 2.0**-11)  # and what the scale lost in fp16
    assert (error < most).all()
    assert error.mean() > most.mean() / 3  # as of values that are spread over the intervals


@every_width
def test_nothing_stays_nothing(bits: int) -> None:
    words, scales = quantise(torch.zeros(2, 64), bits)
    assert not dequantise(words, scales).any()
    assert not dequantise(torch.zeros_like(words), torch.zeros_like(scales)).any()  # a page that was never written


def test_a_plain_tensor_in_place() -> None:
    x = torch.randn(3, 2, 64).half()
    words, scales = torch.zeros(3, 2, 10, dtype=torch.int32), torch.zeros(3, 2, 2).half()
    quant_cache_cont(x, words, scales, 0.0)
    out = torch.empty_like(x)
    dequant_cache_cont(words, scales, out, 0.0)
    assert torch.equal(out, dequantise(*quantise(x, 5)).half())
    with pytest.raises(NotImplementedError, match="no companded cache"):
        quant_cache_cont(x, words, scales, 0.65)


# --- pages ------------------------------------------------------------------------------------------------------------


class Pages:
    """Keys and values of two sequences in a packed cache, three pages each in no order, and the same plain."""

    def __init__(self, bits: tuple[int, int], lengths: list[int]) -> None:
        self.bits = bits
        self.table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.words = [torch.zeros(6, PAGE, GROUPS * width, dtype=torch.int32) for width in bits]
        self.scales = [torch.zeros(6, PAGE, GROUPS).half() for _ in bits]
        self.plain = [torch.zeros(2, 3 * PAGE, HEADS, DIM) for _ in bits]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.words[0], self.scales[0], self.words[1], self.scales[1]]

    def append(self, k: Tensor, v: Tensor) -> None:
        count = k.shape[1]
        quant_cache_paged(
            k, self.words[0], self.scales[0], v, self.words[1], self.scales[1],
            self.lengths, self.table, PAGE, count, 0.0, True,
        )  # fmt: skip
        for plain, new, bits in zip(self.plain, (k, v), self.bits, strict=True):
            for row, past in enumerate(self.lengths.tolist()):
                plain[row, past : past + count] = dequantise(*quantise(new[row].flatten(1), bits)).view_as(new[row])


def new_rows(count: int) -> Tensor:
    return torch.randn(2, count, HEADS, DIM).half()


def test_new_rows_go_behind_what_a_sequence_has_and_nowhere_else() -> None:
    pages = Pages((6, 3), [250, 0])
    pages.append(new_rows(300), new_rows(300))
    k, v = torch.zeros(6, PAGE, HEADS, DIM).half(), torch.zeros(6, PAGE, HEADS, DIM).half()
    dequant_cache_paged(
        pages.words[0], pages.scales[0], k, pages.words[1], pages.scales[1], v,
        pages.lengths + 300, pages.table, PAGE, -1, 0.0,
    )  # fmt: skip
    for out, plain in zip((k, v), pages.plain, strict=True):
        for row in range(2):
            assert torch.equal(out[pages.table[row].long()].flatten(0, 1), plain[row].half())
    assert not any(tensor[3].any() for tensor in pages.tensors)
    assert not any(tensor[4, :250].any() for tensor in pages.tensors)


def test_rows_are_packed_alike_from_pages() -> None:
    """The engine's other way, where attention has appended to unpacked pages."""
    pages = Pages((8, 4), [255, 10])
    k, v = new_rows(5), new_rows(5)
    pages.append(k, v)
    plain = [torch.zeros(6, PAGE, HEADS, DIM).half() for _ in range(2)]
    for cache, new in zip(plain, (k, v), strict=True):
        for row, past in enumerate(pages.lengths.tolist()):
            for index in range(5):
                page, place = divmod(past + index, PAGE)
                cache[pages.table[row, page], place] = new[row, index]
    again = Pages((8, 4), [255, 10])
    quant_cache_paged(
        plain[0], again.words[0], again.scales[0], plain[1], again.words[1], again.scales[1],
        again.lengths, again.table, PAGE, 5, 0.0, False,
    )  # fmt: skip
    for ours, theirs in zip(again.tensors, pages.tensors, strict=True):
        assert torch.equal(ours, theirs)


# --- attention and the engine's cache ---------------------------------------------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float, sinks: Tensor | None) -> Tensor:
    """Causal attention of the last queries of a sequence, in fp32."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * DIM**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(len(k) - len(q), len(k)).view(-1, 1) - torch.arange(len(k))
    hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v)


def cache_layer(k_bits: int, v_bits: int, dim: int = DIM) -> Any:
    module = importlib.import_module("exllamav3.cache.quant")
    layer = module.CacheLayer_quant(
        None, SimpleNamespace(num_kv_heads=HEADS, head_dim=dim), 0, 6 * PAGE, k_bits, v_bits
    )
    layer.alloc(torch.device("cpu"))
    return layer


@pytest.mark.parametrize("new", [1, 7, 300])
@pytest.mark.parametrize("options", [{}, {"window_size": 100}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5] * 4)}])
def test_attention_is_that_over_unpacked_keys_and_values(new: int, options: dict[str, Any]) -> None:
    dispatch = importlib.import_module("exllamav3.modules.attention_fn.dispatch").attn_dispatch
    layer, pages = cache_layer(8, 5), Pages((8, 5), [0, 0])
    for count in (200, new):
        q = torch.randn(2, count, 4, DIM)
        k, v = new_rows(count), new_rows(count)
        out = dispatch(q, k, v, cache=layer, block_table=pages.table, cache_seqlens=pages.lengths, **options)
        pages.append(k, v)
        pages.lengths += count
    for row, end in enumerate(pages.lengths.tolist()):
        keys, values = (plain[row, :end] for plain in pages.plain)
        expected = naive(
            q[row], keys, values, options.get("window_size"), options.get("softcap", 0.0), options.get("sinks")
        )
        torch.testing.assert_close(out[row].float(), expected, atol=2e-3, rtol=2e-3)
    for ours, theirs in zip(layer.get_tensors(), (*pages.words, *pages.scales), strict=True):
        assert torch.equal(ours, theirs)


def test_models_attend_to_a_cache_as_it_is_packed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And do not unpack all of it into another one for each layer and step."""

    def refused(*arguments: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr("exllamav3.cache.quant.CacheLayer_quant.get_kv", refused)
    assert engine_logits(tiny_llama, prompt(30), cache_bits=(8, 8)).isfinite().all()


def test_heads_that_groups_do_not_divide_are_unpacked_first() -> None:
    """Two heads of 48 are three groups; the engine does not attend to them as they are packed."""
    dispatch = importlib.import_module("exllamav3.modules.attention_fn.dispatch").attn_dispatch
    layer = cache_layer(8, 8, dim=48)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    q, k, v = torch.randn(1, 40, 4, 48).half(), torch.randn(1, 40, 2, 48).half(), torch.randn(1, 40, 2, 48).half()
    dispatch(q, k, v, cache=layer, block_table=table, cache_seqlens=torch.tensor([0], dtype=torch.int32))
    for words, scales, rows in ((layer.qk, layer.sk, k), (layer.qv, layer.sv, v)):
        expected = quantise(rows[0].flatten(1), 8)
        assert torch.equal(words[3, :40], expected[0])
        assert torch.equal(scales[3, :40], expected[1])


def test_a_page_is_copied_bit_for_bit() -> None:
    layer, pages = cache_layer(6, 5), Pages((6, 5), [0, 0])
    layer.update_kv_direct(pages.lengths, pages.table, new_rows(PAGE), new_rows(PAGE), PAGE)
    layer.copy_page(layer, 4, 2, 100)
    for tensor in layer.get_tensors():
        assert tensor[4].any()
        assert torch.equal(tensor[2, :100], tensor[4, :100])
        assert not tensor[2, 100:].any()


def test_a_cache_takes_what_it_says() -> None:
    layer = cache_layer(5, 2)
    assert sum(tensor.nbytes for tensor in layer.get_tensors()) == layer.storage_size()
