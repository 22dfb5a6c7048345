from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import attention
from backends.exllamav3.cpu.attention import (
    ATTENTION_FUNCTIONS,
    Window,
    attend,
    attend_cached,
    by_span,
    paged_attention,
)
from backends.exllamav3.cpu.paging import append_rows

PAGE = 4
DIM = 8


def test_parts_of_the_keys_and_masked_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the first sequence lie apart; queries are masked three at a time."""
    monkeypatch.setattr(attention, "MASKED_QUERIES", 3)
    k, v, q = torch.randn(19, 2, DIM), torch.randn(19, 2, DIM), torch.randn(8, 4, DIM)
    caches = [torch.zeros(8, PAGE, 2, DIM) for _ in range(2)]
    table, past = torch.tensor([[6, 7, 2, 0, 1]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    for cache, rows in zip(caches, (k, v), strict=True):
        append_rows(cache, table[0], 0, rows[:11])
    cases: list[dict[str, Any]] = [{}, {"window": (5, 0)}, {"softcap": 2.0}, {"sinks": torch.randn(4)}]
    for case in cases:
        options = {"window_size" if name == "window" else name: value for name, value in case.items()}
        new, cached = (k[None, 11:], v[None, 11:]), (caches[0], caches[1])
        out = paged_attention(q[None], *new, *cached, table, past, True, 0.3, **options)
        torch.testing.assert_close(out[0], naive(q, k, v, causal=True, scale=0.3, **case))


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query and head at a time."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        position = len(k) - len(q) + i
        first = max(0, position - window[0]) if window[0] >= 0 else 0
        last = position if causal else len(k) - 1
        if window[1] >= 0 and not causal:
            last = min(last, position + window[1])
        for head in range(q.shape[1]):
            logits = [scale * float(q[i, head] @ k[j, head // group]) for j in range(first, last + 1)]
            if softcap:
                logits = [softcap * math.tanh(logit / softcap) for logit in logits]
            weights = [math.exp(logit) for logit in logits]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, j in zip(weights, range(first, last + 1), strict=True):
                out[i, head] += weight / total * v[j, head // group]
    return out


@pytest.mark.parametrize("queries", [1, 3, 9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 2)])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, False), (0.0, True), (2.0, True)])
def test_attention(queries: int, causal: bool, window: Window, softcap: float, with_sinks: bool) -> None:
    q, k, v = torch.randn(queries, 4, DIM), torch.randn(9, 2, DIM), torch.randn(9, 2, DIM)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": 0.4,
        "window": window,
        "softcap": softcap,
        "sinks": torch.randn(4) if with_sinks else None,
    }
    torch.testing.assert_close(attend(q, k, v, **options), naive(q, k, v, **options))


@dataclass
class Paged:
    """Two sequences of 6 and 3 tokens on pages that lie anywhere."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths: Tensor

    def call(self, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        return paged_attention(q, k, v, self.k_cache, self.v_cache, self.table, self.lengths, True, 0.3, **options)


@pytest.fixture
def paged() -> Paged:
    k, v = torch.randn(2, 11, 2, DIM), torch.randn(2, 11, 2, DIM)
    caches = torch.full((2, 8, PAGE, 2, DIM), float("nan"))  # what is not written must not be read
    table = torch.tensor([[5, 0, 7], [2, 3, 4]], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    for row in range(2):
        for token in range(int(lengths[row])):
            page = int(table[row, token // PAGE])
            caches[0, page, token % PAGE], caches[1, page, token % PAGE] = k[row, token], v[row, token]
    return Paged(k, v, caches[0], caches[1], table, lengths)


def new_rows(paged: Paged, rows: Tensor, count: int) -> Tensor:
    return torch.stack([rows[row, int(paged.lengths[row]) :][:count] for row in range(2)])


@pytest.mark.parametrize("window", [None, 2, (3, 0)])
def test_new_keys_are_appended_and_attended_to(paged: Paged, window: int | Window | None) -> None:
    q = torch.randn(2, 5, 4, DIM)
    new_k, new_v = new_rows(paged, paged.k, 5), new_rows(paged, paged.v, 5)
    out = paged.call(q, new_k, new_v, window_size=window)
    limits = (-1, -1) if window is None else (window, 0) if isinstance(window, int) else window
    for row in range(2):
        total = int(paged.lengths[row]) + 5
        expected = naive(q[row], paged.k[row, :total], paged.v[row, :total], causal=True, scale=0.3, window=limits)
        torch.testing.assert_close(out[row], expected)
        pages = paged.table[row, : -(-total // PAGE)].long()
        assert torch.equal(paged.k_cache[pages].flatten(0, 1)[:total], paged.k[row, :total])
        assert torch.equal(paged.v_cache[pages].flatten(0, 1)[:total], paged.v[row, :total])


@pytest.mark.parametrize("queries", [1, 5])
def test_keys_given_directly_are_not_stored(paged: Paged, queries: int) -> None:
    q = torch.randn(2, queries, 4, DIM)  # with fewer queries than new keys, the queries are the last ones
    new_k, new_v = new_rows(paged, paged.k, 5), new_rows(paged, paged.v, 5)
    before = paged.k_cache.clone()
    out = paged.call(q, None, None, k_new=new_k, v_new=new_v)
    assert torch.equal(paged.k_cache.nan_to_num(), before.nan_to_num())
    for row in range(2):
        total = int(paged.lengths[row]) + 5
        expected = naive(q[row], paged.k[row, :total], paged.v[row, :total], causal=True, scale=0.3)
        torch.testing.assert_close(out[row], expected)


def test_cached_keys_alone(paged: Paged) -> None:
    q = torch.randn(2, 2, 4, DIM)
    out = paged.call(q, None, None)
    for row, length in enumerate(paged.lengths.tolist()):
        expected = naive(q[row], paged.k[row, :length], paged.v[row, :length], causal=True, scale=0.3)
        torch.testing.assert_close(out[row], expected)


def test_no_cache_at_all_uses_the_usual_scale() -> None:
    q, k, v = torch.randn(2, 3, 4, DIM), torch.randn(2, 3, 2, DIM), torch.randn(2, 3, 2, DIM)
    out = paged_attention(q, None, None, None, None, None, None, causal=True, k_new=k, v_new=v)
    for row in range(2):
        torch.testing.assert_close(out[row], naive(q[row], k[row], v[row], causal=True, scale=DIM**-0.5))


def test_half_inputs_keep_their_type() -> None:
    q = torch.randn(3, 4, DIM).half()
    assert attend(q, q, q, causal=True, scale=1.0).dtype == torch.half


def test_one_of_the_functions_takes_a_call_of_the_dispatcher(paged: Paged) -> None:
    from exllamav3.modules.attention_fn import dispatch

    import backends.exllamav3.engine  # noqa: F401  (installs the kernels)

    assert dispatch.attn_fns == ATTENTION_FUNCTIONS
    q = torch.randn(2, 5, 4, 16)
    k, v = torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    out = dispatch.attn_dispatch(q, k, v, causal=True)
    for row in range(2):
        torch.testing.assert_close(out[row], naive(q[row], k[row], v[row], causal=True, scale=16**-0.5))


def test_segments_of_a_row_see_themselves_alone() -> None:
    from exllamav3.modules.attention_fn import dispatch

    import backends.exllamav3.engine  # noqa: F401  (installs the kernels)

    q, k, v = torch.randn(1, 9, 4, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    ends = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    out = dispatch.attn_dispatch(q, k, v, cu_seqlens=ends, max_seqlen=4, causal=False)
    for start, end in itertools.pairwise(ends.tolist()):
        part = slice(start, end)
        expected = naive(q[0, part], k[0, part], v[0, part], causal=False, scale=16**-0.5)
        torch.testing.assert_close(out[0, part], expected)


@pytest.mark.parametrize("size", [None, 2])
def test_tokens_of_an_image_see_each_other(paged: Paged, size: int | None) -> None:
    from exllamav3.modules.attention_fn.common import AttnArgs

    q = torch.randn(2, 5, 4, DIM)
    k, v = new_rows(paged, paged.k, 5), new_rows(paged, paged.v, 5)
    spans = [(0, 1, False), (1, 4, True), (4, 5, False)]
    shapes = (2, 5, 4, DIM, 5, 2)
    caches = (paged.k_cache, paged.v_cache)
    args = AttnArgs(*shapes, q, k, v, *caches, True, 0.3, None, None, size, 0.0, paged.table, paged.lengths, spans)
    out = by_span(attend_cached)(args)
    assert out is not None
    for row, (begin, end, together) in itertools.product(range(2), spans):
        total = int(paged.lengths[row]) + end
        limits = (-1, -1) if size is None else (3, 2) if together else (size, 0)  # at least the whole image
        keys, values = paged.k[row, :total], paged.v[row, :total]
        expected = naive(q[row, begin:end], keys, values, causal=not together, scale=0.3, window=limits)
        torch.testing.assert_close(out[row, begin:end], expected)


def test_a_function_that_passes_on_a_span_passes_on_all() -> None:
    from exllamav3.modules.attention_fn.common import AttnArgs

    q = torch.randn(1, 2, 4, DIM)
    args = AttnArgs(1, 2, 4, DIM, 2, 4, q, q, q, None, None, True, 1.0, None, None, None, 0.0, None, torch.tensor([0]))
    assert by_span(lambda part: None)(args._replace(non_causal_spans=[(0, 1, False), (1, 2, True)])) is None
