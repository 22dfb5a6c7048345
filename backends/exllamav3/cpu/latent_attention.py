"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): attention over a cache of compressed latents.

A latent c and a rotated key r, shared by all heads, are all that is cached of a token. A head's key is [c W_UK | r] and
its value c W_UV. A few queries are multiplied with W_UK instead ("absorbed"), attend to the latents themselves, and
what they gather is multiplied with W_UV; for many queries keys and values are unfolded, a head at a time. All
arithmetic is fp32. The names are those of the engine's `mla_triton.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.attention import attend
from backends.exllamav3.cpu.paging import append_rows, gather_rows
from backends.exllamav3.cpu.quantised_cache import dequantise, quantise


def mla_kv_append(
    ckv_new: Tensor, kpe_new: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor
) -> None:
    """Append latents (batch, n, rank) and rotated keys (batch, n, dim) to each sequence's pages.

    Args:
        ckv_cache: (pages, page size, 1, rank), written to, of any float type.
        kpe_cache: (pages, page size, 1, dim), alike.
        block_table: (batch, pages of a sequence).
        cache_seqlens: (batch,) tokens cached before.
    """
    mla_plane_append(ckv_new, ckv_cache.squeeze(2), block_table, cache_seqlens)
    mla_plane_append(kpe_new, kpe_cache.squeeze(2), block_table, cache_seqlens)


def mla_kv_quant_append(
    ckv_new: Tensor,
    kpe_new: Tensor,
    qk: Tensor,
    sk: Tensor,
    kpe_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    bits: int,
) -> None:
    """As `mla_kv_append`, with latents in packed form, see `quantised_cache.quantise`.

    Args:
        qk: (pages, page size, rank / 32 * bits) int32.
        sk: (pages, page size, rank / 32) fp16.
    """
    words, scales = quantise(ckv_new, bits)
    for rows, plane in ((words, qk), (scales, sk), (kpe_new, kpe_cache.squeeze(2))):
        mla_plane_append(rows, plane, block_table, cache_seqlens)


def mla_plane_append(rows_new: Tensor, plane_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
    """Append rows (batch, n, dim) to pages (pages, page size, dim), see `mla_kv_append`."""
    for row, past in enumerate(cache_seqlens.tolist()):
        append_rows(plane_cache, block_table[row], past, rows_new[row])


def mla_absorb(q: Tensor, w_uk_flat: Tensor, n_q_heads: int, qk_nope_head_dim: int) -> Tensor:
    """Queries in the space of latents.

    Args:
        q: (rows, heads, dim), of which the first `qk_nope_head_dim` take part.
        w_uk_flat: (rank, heads * qk_nope_head_dim).

    Returns:
        (heads, rows, rank), fp32.
    """
    weight = w_uk_flat.unflatten(-1, (n_q_heads, qk_nope_head_dim)).permute(1, 2, 0)
    return torch.bmm(q[..., :qk_nope_head_dim].transpose(0, 1).float(), weight.float())


def mla_unfold(o_lat: Tensor, w_uv_flat: Tensor, v_head_dim: int) -> Tensor:
    """From (heads, rows, rank) to (rows, heads, value dim) in fp32; w_uv_flat is (rank, heads * value dim)."""
    weight = w_uv_flat.unflatten(-1, (o_lat.shape[0], v_head_dim)).transpose(0, 1)
    return torch.bmm(o_lat.float(), weight.float()).transpose(0, 1).contiguous()


def attend_to_latents(
    q_lat: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    bsz: int,
    q_len: int,
    causal: bool = True,
    softmax_scale: float | None = None,
    pre_appended_len: int = 0,
    qc: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Attention in absorbed form, `mla_attn_triton_decode` and `mla_attn_triton_prefill`.

    The engine uses it for at most 16 queries a sequence: all logits are there at once.

    Args:
        q_lat: (heads, batch * queries, rank); q_pe alike, with the dimension of rotated keys.
        ckv_cache: as of `mla_kv_append`, and so are kpe_cache and block_table.
        cache_seqlens: (batch,) tokens cached before the `pre_appended_len` newest ones.
        bsz: the length of these.
        q_len: queries of each sequence.
        causal: the queries are the newest tokens, each of which sees what is up to it.
        softmax_scale: None is the inverse root of the query's dimensions.
        qc: the scales of a quantised cache, whose words are `ckv_cache`, and its bits; see `mla_kv_quant_append`.

    Returns:
        Like q_lat, fp32.
    """
    if softmax_scale is None:
        softmax_scale = (q_lat.shape[-1] + q_pe.shape[-1]) ** -0.5
    out = torch.empty(q_lat.shape)
    for row, past in enumerate(cache_seqlens.tolist()):
        latents, rotated = _gathered(ckv_cache, kpe_cache, block_table[row], past + pre_appended_len, qc)
        rows = slice(row * q_len, (row + 1) * q_len)
        logits = q_lat[:, rows].float() @ latents.T + q_pe[:, rows].float() @ rotated.T
        if causal and q_len > 1:
            logits = logits.masked_fill(~_visible(q_len, len(latents)), float("-inf"))
        out[:, rows] = (logits * softmax_scale).softmax(-1) @ latents
    return out


def mla_attn_triton_prefill_mha(
    q: Tensor,
    w_uk_flat: Tensor,
    w_uv_flat: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_table: Tensor,
    host_seqlens: list[int],
    bsz: int,
    q_len: int,
    v_head_dim: int,
    qk_nope_head_dim: int,
    softmax_scale: float,
    pre_appended_len: int = 0,
    qc: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Causal attention with each head's keys and values unfolded, one head at a time.

    Args:
        q: (batch * queries, heads, dim), the first `qk_nope_head_dim` not rotated.
        w_uk_flat: (rank, heads * qk_nope_head_dim).
        w_uv_flat: (rank, heads * v_head_dim).
        host_seqlens: `cache_seqlens`.

    The others are those of `attend_to_latents`.

    Returns:
        (batch * queries, heads, v_head_dim), fp32.
    """
    heads, size = q.shape[1:]
    width = max(size, v_head_dim)  # the kernel wants values as wide as keys; zeros change nothing
    out = torch.empty(q.shape[0], heads, v_head_dim)
    w_uk, w_uv = w_uk_flat.unflatten(-1, (heads, -1)), w_uv_flat.unflatten(-1, (heads, -1))
    for row, past in enumerate(host_seqlens):
        latents, rotated = _gathered(ckv_cache, kpe_cache, block_table[row], past + pre_appended_len, qc)
        rows = slice(row * q_len, (row + 1) * q_len)
        for head in range(heads):
            keys = torch.cat((latents @ w_uk[:, head].float(), rotated), dim=-1)
            values = latents @ w_uv[:, head].float()
            query, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (q[rows, head].float(), keys, values))
            attended = attend(
                query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), causal=True, scale=softmax_scale
            )
            out[rows, head] = attended[:, 0, :v_head_dim]
    return out


def _gathered(
    ckv_cache: Tensor, kpe_cache: Tensor, pages: Tensor, count: int, qc: tuple[Tensor, int] | None
) -> tuple[Tensor, Tensor]:
    """The first `count` latents and rotated keys of a sequence, in fp32."""
    rotated = gather_rows(kpe_cache, pages, count).squeeze(1).float()
    if qc is None:
        return gather_rows(ckv_cache, pages, count).squeeze(1).float(), rotated
    scales, _ = qc
    return dequantise(gather_rows(ckv_cache, pages, count), gather_rows(scales, pages, count)), rotated


def _visible(queries: int, keys: int) -> Tensor:
    """(queries, keys): the queries are the last of the positions."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
