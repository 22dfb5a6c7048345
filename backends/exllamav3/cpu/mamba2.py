"""Mamba2: its discretisation, the chunked and the sequential recurrence.

The recurrence of one head (Dao & Gu 2024, "Transformers are SSMs", section 6), with a state S of (state size, head dim)
and, as the engine stores them, B for keys, C for queries and x for values:

    S_t = exp(g_t) S_{t-1} + dt_t B_t x_t^T        y_t = S_t^T C_t + D x_t        g_t = -exp(a_log) dt_t

Consecutive heads of a group share B and C. The engine runs the convolution over [x | B | C].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.delta_net import CHUNK, Heads, state_rows

__all__ = ["cuda_recurrent_mamba2", "mamba2_dt_op"]


def mamba2_dt_op(
    dt_raw: Tensor, dt_bias: Tensor, a_log: Tensor, dt: Tensor, g: Tensor, dt_min: float, dt_max: float
) -> None:
    """dt = softplus(dt_raw + dt_bias) within the limits, and g = -exp(a_log) dt; `mamba2_dt_op_kernel` in gdn.cu.

    Args:
        dt_raw: (batch, tokens, heads); the outputs dt and g alike; arithmetic is fp32.
        dt_bias: (heads,), and a_log alike.
    """
    step = F.softplus(dt_raw.float() + dt_bias.float()).clamp(dt_min, dt_max)
    dt.copy_(step)
    g.copy_(-a_log.float().exp() * step)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T and o_t = scale S_t^T q_t over many tokens, chunk by chunk; fp32 inside.

    Within a chunk it is attention with a decaying mask (Dao & Gu 2024, section 6); only one state a chunk is formed.

    Args:
        q: (batch, tokens, heads, key dim), and k alike; of any float type, as v.
        v: (batch, tokens, heads, value dim).
        g: (batch, tokens, heads) log decay.
        initial_state: (batch, heads, key dim, value dim); None is zero.

    Returns:
        Outputs like v, of its type, and the fp32 state after the last token or None.
    """
    batch, tokens, heads, key_dim = q.shape
    state = torch.zeros(batch, heads, key_dim, v.shape[-1])
    if initial_state is not None:
        state = state + initial_state.float()
    out = torch.empty_like(v)
    for start in range(0, tokens, CHUNK):
        chunk = slice(start, start + CHUNK)
        queries, keys, values = (x[:, chunk].transpose(1, 2).float() for x in (q, k, v))
        decay = g[:, chunk].float().transpose(1, 2).unsqueeze(-1).cumsum(-2)  # from the start of the chunk
        # Above the diagonal the difference is positive and may overflow; 0 in its place, which `tril` drops.
        mask = (decay - decay.transpose(-1, -2)).tril().exp().tril()
        inside = ((queries @ keys.transpose(-1, -2)) * mask) @ values
        out[:, chunk] = (scale * (inside + (queries * decay.exp()) @ state)).transpose(1, 2)
        whole = decay[..., -1:, :]
        state = state * whole.exp() + (keys * (whole - decay).exp()).transpose(-1, -2) @ values
    return out, state if output_final_state else None


def cuda_recurrent_mamba2(
    mixed_xbc: Tensor,
    g: Tensor,
    dt: Tensor,
    skip: Tensor,
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
        mixed_xbc: (batch, tokens, channels), channels being all x, then all B, then all C.
        g: (batch, tokens, value heads) log decay; dt alike.
        skip: (value heads,) D.
        num_k_heads: groups; num_v_heads are the heads, k_head_dim is the state size.

    The others are those of `delta_net.cuda_recurrent_gated_delta_rule`.
    """
    heads = Heads(num_k_heads, num_v_heads, k_head_dim, v_head_dim)
    for index, (row_in, row_out) in enumerate(state_rows(mixed_xbc.shape[0], slots, history, slots_in)):
        out, state = scan(mixed_xbc[index], g[index], dt[index], recurrent_state[row_in, 0].float(), heads)
        x = mixed_xbc[index, :, : out[0].numel()].float().view_as(out)
        core_attn_out[index].copy_(out + x * skip.float().unsqueeze(-1))
        recurrent_state[row_out, 0].copy_(state)


def scan(mixed_xbc: Tensor, g: Tensor, dt: Tensor, state: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, value heads, value dim) without D x, and the new state of one sequence, both fp32."""
    keys, values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    x, b, c = mixed_xbc.float().split([values, keys, keys], dim=-1)
    # Both by groups of heads, so that B and C need not be repeated.
    grouped = heads.keys, heads.group, heads.value_dim
    written = (x.unflatten(-1, (heads.values, heads.value_dim)) * dt.float().unsqueeze(-1)).view(-1, *grouped)
    b, c = (y.unflatten(-1, (heads.keys, heads.key_dim)) for y in (b, c))
    decay = g.float().exp().view(-1, heads.keys, heads.group, 1, 1)
    state = state.unflatten(0, (heads.keys, heads.group))

    out = torch.empty_like(written)
    for step in range(out.shape[0]):
        state = state * decay[step] + b[step].view(heads.keys, 1, -1, 1) * written[step].unsqueeze(-2)
        out[step] = (c[step].view(heads.keys, 1, 1, -1) @ state).squeeze(-2)
    return out.flatten(1, 2), state.flatten(0, 1)
