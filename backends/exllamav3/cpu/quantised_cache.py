"""The quantised key/value cache: packing, unpacking, and attention over packed keys and values.

The format stands in the engine's q_cache_kernels.cuh. 32 values in a row are a group. It is rotated by the Hadamard
matrix of 32, which makes its values alike, and divided by the largest of them, which is kept in fp16. What is left, in
[-1, 1], falls into one of 2^bits equal intervals and comes back as the middle of it. A group is packed as bit planes of
8, 4, 2 and 1 bits, those that add up, the highest bits first; a plane of w bits is w words of int32, filled from their
lowest bit.

As the rotation is orthonormal and does not mix heads, attention rotates queries and its result instead of every key and
value: q . k = Hq . Hk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from backends.exllamav3.cpu.attention import Window, attend
from backends.exllamav3.cpu.paging import append_rows, gather_rows

__all__ = ["dequant_cache_cont", "dequant_cache_paged", "quant_cache_cont", "quant_cache_paged"]

GROUP: Final = 32
PLANES: Final = (8, 4, 2, 1)
SCALE: Final = GROUP**-0.5  # makes the rotation orthonormal


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack the last dimension of x, a multiple of 32.

    Args:
        bits: 2 to 8.

    Returns:
        (..., dim / 32 * bits) int32 and (..., dim / 32) fp16.
    """
    rotated = _rotated(x.float().unflatten(-1, (-1, GROUP))) * SCALE
    scales = rotated.abs().amax(-1, keepdim=True) + 1e-10
    half = 1 << (bits - 1)
    # A multiplication by a power of two is exact, so that this is the fused one of the CUDA source.
    levels = (rotated * (1.0 / scales) * half + half).floor().clamp(0, 2 * half - 1)
    return _pack(levels.to(torch.uint8), bits).flatten(-2), scales.squeeze(-1).half()


def dequantise(words: Tensor, scales: Tensor) -> Tensor:
    """What `quantise` packed, in fp32."""
    return _rotated(_unpacked(words, scales) * SCALE).flatten(-2)


def _unpacked(words: Tensor, scales: Tensor) -> Tensor:
    """Groups as they were rotated: (..., groups, 32) in fp32."""
    groups = scales.shape[-1]
    bits = words.shape[-1] // groups
    planes = words.contiguous().view(torch.uint8).unflatten(-1, (groups, -1))
    levels = torch.zeros((), dtype=torch.uint8)
    for width, _, place in _planes(bits):
        plane = planes[..., place]
        if width < 8:
            mask = (1 << width) - 1
            plane = torch.stack([(plane >> shift) & mask for shift in range(0, 8, width)], -1).flatten(-2)
        levels = (levels << width) | plane
    half = 1 << (bits - 1)
    return levels.float().sub_(half - 0.5).mul_((scales.float() / half).unsqueeze(-1))


def _pack(levels: Tensor, bits: int) -> Tensor:
    """(..., 32) uint8 to (..., bits) int32."""
    packed = []
    for width, below, _ in _planes(bits):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        plane = (levels >> below) & ((1 << width) - 1)
        packed.append((plane.unflatten(-1, (-1, 8 // width)) << shifts).sum(-1, dtype=torch.uint8))
    return torch.cat(packed, -1).view(torch.int32)


def _planes(bits: int) -> Iterator[tuple[int, int, slice]]:
    """Of each plane its width, the bits below it, and the bytes of a group that it takes."""
    below, begin = bits, 0
    for width in PLANES:
        if bits & width:
            below -= width
            end = begin + GROUP * width // 8
            yield width, below, slice(begin, end)
            begin = end


def _rotated(x: Tensor) -> Tensor:
    """The Hadamard transform of the last dimension, 32, not yet scaled; in the CUDA source's order of additions."""
    for stride in (1, 2, 4, 8, 16):
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x


def quant_cache_cont(x: Tensor, out: Tensor, out_scales: Tensor, compand_a: float) -> None:
    """Pack x, (..., dim) of any float type.

    Args:
        out: out, (..., dim / 32 * bits) int32.
        out_scales: out, (..., dim / 32) fp16.
        compand_a: 0; above it, intervals would not be equal.

    Raises:
        NotImplementedError: `compand_a` is above 0. So it is for the other three.
    """
    _check_linear(compand_a)
    words, scales = quantise(x, out.shape[-1] // out_scales.shape[-1])
    out.copy_(words)
    out_scales.copy_(scales)


def dequant_cache_cont(x: Tensor, scales: Tensor, out: Tensor, compand_a: float) -> None:
    """Unpack what `quant_cache_cont` packed into out, (..., dim) of any float type."""
    _check_linear(compand_a)
    out.copy_(dequantise(x, scales))


def quant_cache_paged(
    k_in: Tensor,
    k_out: Tensor,
    k_out_scales: Tensor,
    v_in: Tensor,
    v_out: Tensor,
    v_out_scales: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_len: int,
    compand_a: float,
    in_contiguous: bool,
) -> None:
    """Pack new keys and values into each sequence's pages, behind what it has.

    Args:
        k_in: (batch, seq_len, heads, dim) with `in_contiguous`, else pages as k_out; v_in alike.
        k_out: out, (pages, page size, groups * bits) int32, and k_out_scales (pages, page size, groups) fp16, of
            heads * dim / 32 groups a token; v alike.
        cache_seqlens: (batch,) tokens before these.
        block_table: (batch, pages of a sequence).
        page_size: that of k_out.
    """
    _check_linear(compand_a)
    for source, words, scales in ((k_in, k_out, k_out_scales), (v_in, v_out, v_out_scales)):
        bits = words.shape[-1] // scales.shape[-1]
        for row, past in enumerate(cache_seqlens.tolist()):
            pages = block_table[row]
            rows = source[row] if in_contiguous else gather_rows(source, pages, past + seq_len)[past:]
            for cache, new in zip((words, scales), quantise(rows.flatten(1), bits), strict=True):
                append_rows(cache, pages, past, new)


def dequant_cache_paged(
    k_in: Tensor,
    k_in_scales: Tensor,
    k_out: Tensor,
    v_in: Tensor,
    v_in_scales: Tensor,
    v_out: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    page_size: int,
    sliding_window: int,
    compand_a: float,
) -> None:
    """Unpack each sequence's pages to the same places of k_out and v_out, (pages, page size, heads, dim).

    Arguments as of `quant_cache_paged`, but:

    Args:
        cache_seqlens: (batch,) tokens to unpack.
        sliding_window: above 0, earlier tokens than the last so many are not needed. They are unpacked all the same.
    """
    _check_linear(compand_a)
    for words, scales, out in ((k_in, k_in_scales, k_out), (v_in, v_in_scales, v_out)):
        for row, count in enumerate(cache_seqlens.tolist()):
            pages = block_table[row]
            values = dequantise(gather_rows(words, pages, count), gather_rows(scales, pages, count))
            append_rows(out, pages, 0, values.view(count, *out.shape[2:]))


def _check_linear(compand_a: float) -> None:
    if compand_a > 0:
        raise NotImplementedError("The CPU kernels have no companded cache, only equal intervals. Use a CUDA GPU.")


def attend_quantised(args: Any) -> Tensor | None:
    """Of the engine's `AttnArgs`, those with a packed cache, which has the new keys and values already."""
    if args.q_cache is None or args.is_varlen() or args.non_causal_spans:
        return None
    keys, key_scales, values, value_scales = args.q_cache[:4]
    window = args.get_window_size()
    rotated = _rotate_heads(args.q.float())
    out = torch.empty_like(rotated)
    for row, past in enumerate(args.cache_seqlens.tolist()):
        seen = past + args.q_len
        first = _first_seen(past, window)
        k, v = (
            _unpacked(*(gather_rows(x, args.block_table[row], seen)[first:] for x in packed)).view(
                seen - first, args.num_kv_heads, args.dim
            )
            for packed in ((keys, key_scales), (values, value_scales))
        )
        out[row] = attend(
            rotated[row],
            k,
            v,
            causal=args.causal,
            scale=args.sm_scale or 1.0 / math.sqrt(args.dim),
            window=window,
            softcap=args.softcap,
            sinks=args.sinks,
        )
    return _rotate_heads(out).to(args.q.dtype)


def _rotate_heads(x: Tensor) -> Tensor:
    return (_rotated(x.unflatten(-1, (-1, GROUP))) * SCALE).flatten(-2)


def _first_seen(past: int, window: Window) -> int:
    """The first key that a query behind `past` tokens sees."""
    left, _ = window
    return max(0, past - left) if left >= 0 else 0
