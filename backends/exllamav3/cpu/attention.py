"""Attention over a paged cache and without one, in fp32.

`ATTENTION_FUNCTIONS` replaces the list that the engine's dispatcher tries in turn; its sliding-window layers call
`paged_attention` themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from backends.exllamav3.cpu.paging import append_rows, page_runs

AttentionFunction: TypeAlias = Callable[[Any], Tensor | None]  # of the engine's dispatcher
Window = tuple[int, int]  # keys visible to the left and to the right of a query's own; -1 is no limit
NO_WINDOW: Window = (-1, -1)
Part: TypeAlias = tuple[Tensor, Tensor]  # keys and values of positions that follow each other, (n, key heads, dim)
Partial: TypeAlias = tuple[Tensor, Tensor]  # attention to some of the keys, and the logarithm of its softmax's sum

# Queries that share a mask: what it hides is computed in vain.
MASKED_QUERIES: Final = 256

# The operator itself: what `torch.ops` looks for in the arguments first costs a decode step time.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu._op


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
    return _attend(q, [(k, v)], causal, scale, window, softcap, sinks)


def _attend(
    q: Tensor, parts: Sequence[Part], causal: bool, scale: float, window: Window, softcap: float, sinks: Tensor | None
) -> Tensor:
    """As `attend`, with the keys in parts, which are read where they are.

    Attention to parts of the keys adds up: each is weighted by its share of the softmax's sum (Dao et al. 2022,
    FlashAttention, section 3.1). There is a mask only where a window or a soft cap needs one, for a
    few queries at a time.
    """
    queries, keys = len(q), sum(len(k) for k, _ in parts)
    left, right = window
    right = 0 if causal else right
    grouped = _grouped(q.float(), parts[0][0].shape[1])
    if softcap == 0.0 and (queries == 1 or left < 0) and (causal or right < 0):
        first = max(0, keys - 1 - left) if left >= 0 else 0
        last = keys - queries if causal and queries > 1 else keys
        whole = first == 0 and last == keys
        partials = [_partial(grouped, part, scale) for part in (parts if whole else _cut(parts, first, last))]
        if last < keys:
            partials.append(_partial(grouped, _joined(_cut(parts, last, keys)), scale, causal=True))
        return _ungrouped(_merged(partials, sinks), q)

    out = torch.empty_like(q)
    for begin in range(0, queries, MASKED_QUERIES):
        block = grouped[:, :, begin : begin + MASKED_QUERIES]
        end = begin + block.shape[2]
        past = keys - queries
        first = max(0, past + begin - left) if left >= 0 else 0
        last = min(keys, past + end + right) if right >= 0 else keys
        part = _joined(_cut(parts, first, last))
        hidden = _hidden(torch.arange(past + begin, past + end), torch.arange(first, last), left, right)
        partial = _masked(block, part, hidden, scale, softcap)
        out[begin:end] = _ungrouped(_merged([partial], sinks), out[begin:end])
    return out


def _grouped(q: Tensor, key_heads: int) -> Tensor:
    """(key heads, query heads of each, queries, dim)."""
    return q.view(len(q), key_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)


def _ungrouped(out: Tensor, like: Tensor) -> Tensor:
    return out.permute(2, 0, 1, 3).reshape(like.shape).to(like.dtype)


def _partial(grouped: Tensor, part: Part, scale: float, causal: bool = False) -> Partial:
    """Each query sees all keys, or with `causal` as many as its number among as many queries.

    Returns:
        (key heads, group, queries, dim) and (key heads, group, queries).
    """
    k, v = (x.float().transpose(0, 1) for x in part)
    if causal:
        group = (-1, grouped.shape[1], -1, -1)
        out, sums = _flash(grouped, k.unsqueeze(1).expand(group), v.unsqueeze(1).expand(group), 0.0, True, scale=scale)
    else:  # all queries that share a head of keys go through these together
        out, sums = _flash(grouped.flatten(1, 2).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, False, scale=scale)
    return out.view(grouped.shape), sums.view(grouped.shape[:-1])


def _masked(grouped: Tensor, part: Part, hidden: Tensor, scale: float, softcap: float) -> Partial:
    """With the keys hidden, (queries, keys), left out."""
    k, v = (x.float().transpose(0, 1).unsqueeze(1) for x in part)
    logits = (grouped * scale) @ k.transpose(-1, -2)
    if softcap != 0.0:
        logits.div_(softcap).tanh_().mul_(softcap)
    logits.masked_fill_(hidden, float("-inf"))
    sums = logits.logsumexp(-1)
    return logits.sub_(sums.unsqueeze(-1)).exp_() @ v, sums


def _merged(partials: Sequence[Partial], sinks: Tensor | None) -> Tensor:
    out, sums = partials[0]
    for other, others in partials[1:]:
        out = torch.lerp(out, other, torch.sigmoid(others - sums).unsqueeze(-1))
        sums = torch.logaddexp(sums, others)
    if sinks is not None:
        out = out * torch.sigmoid(sums - sinks.float().view(*sums.shape[:2], 1)).unsqueeze(-1)
    return out


def _hidden(queries: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """Of positions, whether a query (row) does not see a key (column)."""
    distance = keys - queries.unsqueeze(-1)
    hidden = distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance < -left) if left >= 0 else hidden


def _cut(parts: Sequence[Part], first: int, last: int) -> list[Part]:
    """Keys and values [first, last) of all that the parts hold."""
    taken = []
    begin = 0
    for k, v in parts:
        rows = slice(max(0, first - begin), max(0, last - begin))
        if rows.start < min(rows.stop, len(k)):
            taken.append((k[rows], v[rows]))
        begin += len(k)
    return taken


def _joined(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    keys, values = (torch.cat([x.float() for x in rows]) for rows in zip(*parts, strict=True))
    return keys, values


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
    window = _window(window_size)
    pasts = cache_seqlens.tolist() if k_cache is not None and cache_seqlens is not None else [0] * len(q)
    rows = []
    for row, past in enumerate(pasts):
        parts: list[Part] = []
        if k_cache is not None and v_cache is not None and block_table is not None:
            pages, count = block_table[row].tolist(), past
            if k is not None and v is not None:
                append_rows(k_cache, pages, past, k[row])
                append_rows(v_cache, pages, past, v[row])
                count += k.shape[1]
            keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
            parts = [(keys[run], values[run]) for run in page_runs(pages, k_cache.shape[1], count)]
        if k_new is not None and v_new is not None:
            parts.append((k_new[row], v_new[row]))
        rows.append(_attend(q[row], parts, causal, scale, window, softcap, sinks))
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


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


def by_span(function: AttentionFunction) -> AttentionFunction:
    """Let a function take spans, too: parts of a chunk that each see what is before their end.

    In some of them, the tokens of an image, all see each other.
    """

    @wraps(function)
    def attend_spans(args: Any) -> Tensor | None:
        if not args.non_causal_spans:
            return function(args)
        attended: list[Tensor] = []
        for span in args.non_causal_spans:
            part = function(_of_span(args, *span))
            if part is None:
                return None
            attended.append(part)
        return torch.cat(attended, dim=1)

    return attend_spans


def _of_span(args: Any, begin: int, end: int, together: bool, before: int = 0) -> Any:
    """The arguments for a span alone, of which `before` tokens were in the chunk before this one."""
    length = end - begin
    left, right = args.window_size, args.window_right
    if together and args.is_swa():
        left, right = max(left, length + before), length - 1
    return args._replace(
        q_len=length,
        kv_len=length,
        q=args.q[:, begin:end],
        k=args.k[:, begin:end],
        v=args.v[:, begin:end],
        cache_seqlens=args.cache_seqlens + begin,
        causal=not together,
        window_size=left,
        window_right=right,
        non_causal_spans=None,
    )


ATTENTION_FUNCTIONS: list[AttentionFunction] = [by_span(attend_cached), attend_uncached, attend_segments]
