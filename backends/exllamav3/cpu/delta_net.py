"""Gated DeltaNet: gates, the chunked and the sequential delta rule, and taking back speculated tokens.

The recurrence of one head (Yang et al. 2024, "Gated Delta Networks"), with a state S of (key dim, value dim):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(g_t) S_{t-1})        o_t = q_t^T S_t

Queries and keys are divided by their L2 norm, queries also by the root of their dimension. There may be more value
heads than key heads; consecutive value heads share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.memory import tensor_at

__all__ = [
    "ConvRewindJob",
    "ScanReplayJob",
    "batched_conv_rewind",
    "batched_scan_replay",
    "cuda_recurrent_gated_delta_rule",
    "gated_delta_net_fused_op",
    "gated_delta_net_fused_op_2",
]

# Of the convolution's state and the inputs of the scan. The CUDA kernels keep them in bf16; `install.py` has the engine
# allocate them in this type.
INTERMEDIATE_DTYPE = torch.float32
CHUNK = 64  # tokens
NORM_EPSILON = 1e-6
GATED_DELTA_RULE = 0  # of the engine's scan kinds


def gated_delta_net_fused_op(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    mixed_qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    g: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    k_head_dim: int,
    v_head_dim: int,
    beta_scale: float,
) -> None:
    """Take Qwen3-Next's packed projections apart.

    Args:
        mixed_qkvz: (batch, tokens, ...), per key head [q | k | its v heads | their z].
        mixed_ba: (batch, tokens, ...), per key head [b of its value heads | a of them].
        mixed_qkv: out, (batch, channels, tokens), channels being all q, then all k, then all v.
        z: out, (batch, tokens, value heads, dim).
        beta: out, see `gated_delta_net_fused_op_2`; g alike.
    """
    batch, tokens, _ = mixed_qkvz.shape
    group = num_v_heads // num_k_heads
    v_dim = group * v_head_dim
    packed = mixed_qkvz.view(batch, tokens, num_k_heads, -1)
    q, k, v, gate = packed.split([k_head_dim, k_head_dim, v_dim, v_dim], dim=-1)
    mixed_qkv.copy_(torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1).transpose(1, 2))
    z.copy_(gate.reshape(z.shape))
    b, a = mixed_ba.view(batch, tokens, num_k_heads, 2 * group).split(group, dim=-1)
    gated_delta_net_fused_op_2(b.flatten(2), a.flatten(2), dt_bias, a_log, beta, g, beta_scale)


def gated_delta_net_fused_op_2(
    b: Tensor, a: Tensor, dt_bias: Tensor, a_log: Tensor, beta: Tensor, g: Tensor, beta_scale: float
) -> None:
    """beta = scale * sigmoid(b); log decay g = -exp(a_log) softplus(a + dt_bias). All (batch, tokens, value heads)."""
    beta.copy_(torch.sigmoid(b.float()) * beta_scale)
    g.copy_(-F.softplus(a.float() + dt_bias.float()) * a_log.float().exp())


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence over many tokens, chunk by chunk in its WY form; fp32 inside.

    Within a chunk the updates u_t that are written to the state solve a triangular system, so that a chunk costs a few
    matrix products instead of one step a token (Yang et al. 2024, section 3.3).

    Args:
        q: (batch, tokens, key heads, key dim), and k alike.
        v: (batch, tokens, value heads, value dim).
        g: (batch, tokens, value heads) log decay; beta alike.
        initial_state: (batch, value heads, key dim, value dim); None is zero.

    Returns:
        Outputs like v, and the state after the last token or None.
    """
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    dtype = v.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = _normalised(q), _normalised(k)
    q = q * key_dim**-0.5
    if value_heads != key_heads:
        q, k = (x.repeat_interleave(value_heads // key_heads, 2) for x in (q, k))

    # To (batch, heads, chunks, chunk, dim); padded tokens change nothing: beta and g are 0.
    padding = -tokens % CHUNK
    q, k, v, g, beta = (
        F.pad(x.transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, CHUNK))
        for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1))
    )
    decay_from_start = g.cumsum(3)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    difference = decay_from_start - decay_from_start.transpose(-1, -2)
    decay = difference.masked_fill(~lower, float("-inf")).exp()

    system = (((beta * k) @ k.transpose(-1, -2)) * decay).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((beta * v, beta * k * decay_from_start.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, state_share = solved.split([value_dim, key_dim], dim=-1)
    attention = (q @ k.transpose(-1, -2)) * decay
    q_decayed = q * decay_from_start.exp()
    decay_of_chunk = decay_from_start[:, :, :, -1:]
    k_decayed = k * (decay_of_chunk - decay_from_start).exp()

    state = torch.zeros(batch, value_heads, key_dim, value_dim)
    if initial_state is not None:
        state = state + initial_state.float()
    out = torch.empty_like(v)
    for chunk in range(v.shape[2]):
        written = update[:, :, chunk] - state_share[:, :, chunk] @ state
        out[:, :, chunk] = q_decayed[:, :, chunk] @ state + attention[:, :, chunk] @ written
        state = state * decay_of_chunk[:, :, chunk].exp() + k_decayed[:, :, chunk].transpose(-1, -2) @ written
    out = out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).contiguous().to(dtype)
    return out, state if output_final_state else None


def chunk_kda(*arguments: object, **options: object) -> tuple[Tensor, Tensor | None]:
    raise NotImplementedError("The CPU kernels have no delta rule with a decay per channel (KDA). Use a CUDA GPU.")


def cuda_recurrent_gated_delta_rule(
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    core_attn_out: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    k_head_dim: int,
    v_head_dim: int,
    slots: Tensor | None = None,
    history: bool = False,
    slots_in: Tensor | None = None,
) -> None:
    """The recurrence over a few tokens, one after the other.

    Args:
        mixed_qkv: (batch, tokens, channels), channels being all q, then all k, then all v.
        g: (batch, tokens, value heads) log decay; beta alike.
        recurrent_state: (rows, 1, value heads, key dim, value dim), updated in place.
        core_attn_out: out, (batch, tokens, value heads, value dim).
        slots: (batch,) the row of the state that each sequence writes, and reads unless `history` says otherwise.
        history: the pass may be taken back in part: it reads the rows `slots_in` and leaves them as they are.
    """
    rows_out = range(mixed_qkv.shape[0]) if slots is None else slots.tolist()
    rows_in = rows_out if not history or slots_in is None else slots_in.tolist()
    for index, (row_out, row_in) in enumerate(zip(rows_out, rows_in, strict=True)):
        out, state = _scan(
            mixed_qkv[index],
            g[index],
            beta[index],
            recurrent_state[row_in, 0].float(),
            num_k_heads,
            num_v_heads,
            k_head_dim,
            v_head_dim,
        )
        core_attn_out[index].copy_(out)
        recurrent_state[row_out, 0].copy_(state)


def _scan(
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    k_head_dim: int,
    v_head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, value heads, value dim) and the new state of one sequence."""
    if g.dim() != 2:
        raise NotImplementedError("The CPU kernels have no delta rule with a decay per channel (KDA). Use a CUDA GPU.")
    keys, values = num_k_heads * k_head_dim, num_v_heads * v_head_dim
    q, k, v = mixed_qkv.float().split([keys, keys, values], dim=-1)
    q = _normalised(q.unflatten(-1, (num_k_heads, k_head_dim))) * k_head_dim**-0.5
    k = _normalised(k.unflatten(-1, (num_k_heads, k_head_dim)))
    if num_v_heads != num_k_heads:
        q, k = (x.repeat_interleave(num_v_heads // num_k_heads, 1) for x in (q, k))
    v = v.unflatten(-1, (num_v_heads, v_head_dim))
    decay = g.float().exp().unsqueeze(-1).unsqueeze(-1)
    beta = beta.float().unsqueeze(-1)

    out = torch.empty_like(v)
    for step in range(v.shape[0]):
        state = state * decay[step]
        written = (v[step] - torch.einsum("hk,hkv->hv", k[step], state)) * beta[step]
        state = state + k[step].unsqueeze(-1) * written.unsqueeze(-2)
        out[step] = torch.einsum("hk,hkv->hv", q[step], state)
    return out, state


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


# --- taking back speculated tokens; the engine names memory by address ------------------------------------------------


@dataclass(frozen=True)
class ConvRewindJob:
    """Move `width` columns of a convolution's state, for `channels` rows that lie `stride` elements apart."""

    source: int
    target: int
    channels: int
    width: int
    stride: int


@dataclass(frozen=True)
class ScanReplayJob:
    """Scan the first `tokens` staged inputs again, which lie `token_stride` rows apart, from one state into another."""

    qkv: int
    g: int
    beta: int
    state_in: int
    state_out: int
    skip: int  # Mamba2 only
    tokens: int
    token_stride: int = 1


def batched_conv_rewind(jobs: Sequence[ConvRewindJob], device_index: int | None) -> None:
    for job in jobs:
        shape, strides = (job.channels, job.width), (job.stride, 1)
        source = tensor_at(job.source, INTERMEDIATE_DTYPE, shape, strides)
        # The two may overlap.
        tensor_at(job.target, INTERMEDIATE_DTYPE, shape, strides).copy_(source.clone())


def batched_scan_replay(
    jobs: Sequence[ScanReplayJob],
    device_index: int | None,
    kind: int,
    num_k_heads: int,
    num_v_heads: int,
    k_head_dim: int,
    v_head_dim: int,
    state_half: bool = False,
) -> None:
    """Run replay jobs; `state_half` says that the states are fp16 instead of fp32."""
    if kind != GATED_DELTA_RULE:
        raise NotImplementedError("The CPU kernels can take back tokens of Gated DeltaNet only. Switch drafting off.")
    channels = 2 * num_k_heads * k_head_dim + num_v_heads * v_head_dim
    state_shape = (num_v_heads, k_head_dim, v_head_dim)
    state_dtype = torch.half if state_half else torch.float
    for job in jobs:
        heads = (job.tokens, num_v_heads), (job.token_stride * num_v_heads, 1)
        _, state = _scan(
            tensor_at(job.qkv, INTERMEDIATE_DTYPE, (job.tokens, channels), (job.token_stride * channels, 1)),
            tensor_at(job.g, torch.float, *heads),
            tensor_at(job.beta, INTERMEDIATE_DTYPE, *heads),
            tensor_at(job.state_in, state_dtype, state_shape).float(),
            num_k_heads,
            num_v_heads,
            k_head_dim,
            v_head_dim,
        )
        tensor_at(job.state_out, state_dtype, state_shape).copy_(state)
