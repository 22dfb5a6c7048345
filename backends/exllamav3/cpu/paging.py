"""The paged key/value cache: writing rows, moving pages, staging a decode step; cache.cu and staging.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cache_rotate", "generator_stage_decode", "paged_kv_cache_update"]


def append_rows(cache: Tensor, pages: Tensor | Sequence[int], past: int, rows: Tensor) -> None:
    """Write rows (n, heads, dim) behind the first `past` of a sequence; cache is (pages, page size, heads, dim)."""
    page_size = cache.shape[1]
    done = 0
    while done < rows.shape[0]:
        page, offset = divmod(past + done, page_size)
        count = min(rows.shape[0] - done, page_size - offset)
        cache[int(pages[page]), offset : offset + count] = rows[done : done + count]
        done += count


def page_runs(pages: Sequence[int], page_size: int, count: int) -> list[slice]:
    """Where in a cache the first `count` rows of a sequence lie, one slice for pages that lie one after the other."""
    used = pages[: -(-count // page_size)]
    starts = [index for index, page in enumerate(used) if index == 0 or page != used[index - 1] + 1]
    runs = []
    for start, end in itertools.pairwise([*starts, len(used)]):
        first = used[start] * page_size
        runs.append(slice(first, first + min(end * page_size, count) - start * page_size))
    return runs


def gather_rows(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """The first `count` rows of a sequence: a view where its pages lie one after the other, else a copy."""
    rows = cache.flatten(0, 1)
    runs = [rows[run] for run in page_runs(pages.tolist(), cache.shape[1], count)]
    return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else rows[:0]


def paged_kv_cache_update(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor
) -> None:
    """Append new keys and values to each sequence's pages.

    Args:
        k: (batch, n, heads, dim), and v alike, of any float type.
        k_cache: (pages, page size, heads, dim), written to; v_cache alike.
        block_table: (batch, pages of a sequence).
        cache_seqlens: (batch,) tokens cached before.
    """
    for row, past in enumerate(cache_seqlens.tolist()):
        append_rows(k_cache, block_table[row], past, k[row])
        append_rows(v_cache, block_table[row], past, v[row])


def cache_rotate(cache: Tensor, order: Tensor, temp: Tensor) -> None:
    """Copy pages one after the other, as when pages that are in use move together.

    Args:
        cache: (pages, ...) of any type, changed in place.
        order: (2 * copies,) int32 pairs of the page to copy to and the one to copy from, of which -1 is `temp`.
        temp: as large as a page.
    """
    spare = temp.view_as(cache[0])
    moves = order.tolist()
    for to, source in zip(moves[0::2], moves[1::2], strict=True):
        (cache[to] if to >= 0 else spare).copy_(cache[source] if source >= 0 else spare)


def generator_stage_decode(
    arena: Tensor,
    width: int,
    seq_block_index: Sequence[Tensor],
    kv_position: Sequence[int],
    rope_offset: Sequence[int],
    batch_ids: Tensor | None,
    seq_ids: Sequence[Tensor],
    page_seq: Sequence[Tensor],
    page_offset: Sequence[int],
) -> None:
    """Fill the arena of one step, and fetch each row's next input token.

    Args:
        arena: out, int32: the block table (batch rows of `width`, padded with 0), then the cache lengths, then with
            `rope_offset` the positions.
        seq_block_index: each row's pages, int32.
        kv_position: each row's cached tokens.
        rope_offset: each row's, to be added to these; none for models without.
        batch_ids: out, (batch, 1) int64, the token at each row's position.
        seq_ids: each row's tokens, int64; none where the tokens come from elsewhere.
        page_seq: the tokens of each row's page, int64, where its token is noted at `page_offset`.
    """
    batch = len(seq_block_index)
    table = arena[: batch * width].view(batch, width)
    table.zero_()
    for row, pages in enumerate(seq_block_index):
        taken = pages.view(-1)[:width]
        table[row, : taken.numel()] = taken
    tail = [*kv_position, *(position + offset for position, offset in zip(kv_position, rope_offset, strict=False))]
    arena[batch * width : batch * width + len(tail)] = torch.tensor(tail, dtype=arena.dtype)

    if not seq_ids:
        return
    assert batch_ids is not None
    for row, (ids, page, offset) in enumerate(zip(seq_ids, page_seq, page_offset, strict=True)):
        token = ids.view(-1)[kv_position[row]]
        batch_ids[row, 0] = token
        page.view(-1)[offset] = token
