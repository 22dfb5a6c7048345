"""Attention over a paged cache and without one, in fp32.

`ATTENTION_FUNCTIONS` replaces the list that the engine's dispatcher tries in turn; its sliding-window layers call
`paged_attention` themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.paging import append_rows, gather_rows

Window = tuple[int, int]  # keys visible to the left and to the right of a query's own; -1 is no limit
NO_WINDOW: Window = (-1, -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence, whose queries are the last of its positions.

    Args:
        q: (queries, query heads, dim).
        k: (keys, key heads, dim), and v alike; query heads are a multiple of key heads.
        softcap: logits become softcap * tanh(logits / softcap) where it is not 0.
        sinks: (query heads,) logits that take part in the softmax and carry no value.

    Returns:
        (queries, query heads, dim) in q's dtype.
    """
    queries, query_heads, _ = q.shape
    keys, key_heads, _ = k.shape
    group = query_heads // key_heads
    plain = softcap == 0.0 and sinks is None
    if plain and queries == 1 and window == NO_WINDOW:
        return _attend_one(q, k, v, scale)

    qf, kf, vf = (x.float().transpose(0, 1) for x in (q, k, v))
    kf, vf = (x.repeat_interleave(group, 0) if group > 1 else x for x in (kf, vf))
    if plain and causal and window == NO_WINDOW and queries == keys:
        out = F.scaled_dot_product_attention(qf, kf, vf, is_causal=True, scale=scale)
    else:
        visible = _visible(queries, keys, causal, window)
        if plain:
            out = F.scaled_dot_product_attention(qf, kf, vf, attn_mask=visible, scale=scale)
        else:
            out = _attend_explicitly(qf, kf, vf, visible, scale, softcap, sinks)
    return out.transpose(0, 1).to(q.dtype)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query sees every key: a batched product over the heads that share keys."""
    _, query_heads, dim = q.shape
    key_heads = k.shape[1]
    grouped = q.float().view(key_heads, query_heads // key_heads, dim) * scale
    weights = torch.bmm(grouped, k.float().permute(1, 2, 0)).softmax(-1)
    return torch.bmm(weights, v.float().transpose(0, 1)).reshape(1, query_heads, dim).to(q.dtype)


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    logits = (q @ k.transpose(-1, -2)) * scale
    if softcap != 0.0:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return logits.softmax(-1) @ v
    extra = sinks.float().view(-1, 1, 1).expand(-1, q.shape[1], 1)
    return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1] @ v


def _visible(queries: int, keys: int, causal: bool, window: Window) -> Tensor:
    query = torch.arange(keys - queries, keys).view(-1, 1)
    key = torch.arange(keys).view(1, -1)
    left, right = window
    visible = torch.ones((queries, keys), dtype=torch.bool)
    if causal:
        visible &= key <= query
    elif right >= 0:
        visible &= key <= query + right
    if left >= 0:
        visible &= key >= query - left
    return visible


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    max_kv_len: int | None = None,
) -> Tensor:
    """Attention of a batch over its cached keys and new ones.

    Args:
        q: (batch, queries, heads, dim).
        k: (batch, n, key heads, dim), and v alike: appended to the cache, which must have room, before attention.
        k_cache: (pages, page size, key heads, dim), or None to attend over `k_new` alone.
        block_table: (batch, pages of a sequence).
        cache_seqlens: (batch,) tokens cached before this call.
        k_new: as k, but attended to behind the cached keys without being stored.
        max_kv_len: a bound that helps to size a GPU's work; not needed here.
    """
    scale = softmax_scale or 1.0 / math.sqrt(q.shape[-1])
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        keys = _sequence(k_cache, block_table, cache_seqlens, row, k, k_new)
        values = _sequence(v_cache, block_table, cache_seqlens, row, v, v_new)
        out[row] = attend(
            q[row],
            keys,
            values,
            causal=causal,
            scale=scale,
            window=_window(window_size),
            softcap=softcap,
            sinks=sinks,
        )
    return out


def _sequence(
    cache: Tensor | None,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    row: int,
    appended: Tensor | None,
    new: Tensor | None,
) -> Tensor:
    """All keys, or all values, of one sequence."""
    if cache is None or block_table is None or cache_seqlens is None:
        assert new is not None
        return new[row]
    pages, count = block_table[row], int(cache_seqlens[row])
    if appended is not None:
        append_rows(cache, pages, count, appended[row])
        count += appended.shape[1]
    cached = gather_rows(cache, pages, count)
    if new is None:
        return cached
    return torch.cat((cached.to(new.dtype), new[row])) if count else new[row]


def _window(size: int | Window | None) -> Window:
    if size is None:
        return NO_WINDOW
    if isinstance(size, int):
        return NO_WINDOW if size < 0 else (size, 0)
    return size


# --- what the engine's dispatcher calls: a function that returns None passes ------------------------------------------


def attend_cached(args: Any) -> Tensor | None:
    """Of the engine's `AttnArgs`, those with a paged cache."""
    if not args.has_kv_cache() or args.is_varlen() or args.non_causal_spans:
        return None
    return paged_attention(
        args.q,
        args.k,
        args.v,
        args.k_cache,
        args.v_cache,
        args.block_table,
        args.cache_seqlens,
        causal=args.causal,
        softmax_scale=args.sm_scale,
        window_size=args.get_window_size(),
        softcap=args.softcap,
        sinks=args.sinks,
    )


def attend_uncached(args: Any) -> Tensor | None:
    """Of the engine's `AttnArgs`, those without any cache."""
    if args.has_kv_cache() or args.q_cache is not None or args.is_varlen() or args.sink_key0:
        return None
    return paged_attention(
        args.q,
        None,
        None,
        None,
        None,
        None,
        None,
        causal=args.causal,
        softmax_scale=args.sm_scale,
        window_size=args.get_window_size(),
        softcap=args.softcap,
        sinks=args.sinks,
        k_new=args.k,
        v_new=args.v,
    )


def attend_segments(args: Any) -> Tensor | None:
    """Of the engine's `AttnArgs`, those of sequences in a row, each of which sees itself alone: windows of an image."""
    if not args.is_varlen() or args.has_kv_cache() or args.q_cache is not None or args.sink_key0:
        return None
    lengths: list[int] = args.cu_seqlens.diff().tolist()
    segments = zip(*(x.flatten(0, 1).split(lengths) for x in (args.q, args.k, args.v)), strict=True)
    attended = [
        attend(
            q,
            k,
            v,
            causal=args.causal,
            scale=args.sm_scale or 1.0 / math.sqrt(q.shape[-1]),
            window=_window(args.get_window_size()),
            softcap=args.softcap,
            sinks=args.sinks,
        )
        for q, k, v in segments
    ]
    return torch.cat(attended).view(args.q.shape)


ATTENTION_FUNCTIONS: list[Callable[[Any], Tensor | None]] = [attend_cached, attend_uncached, attend_segments]
