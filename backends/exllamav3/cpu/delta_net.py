"""Gated DeltaNet: gates, the chunked and the sequential delta rule.

The recurrence of one head (Yang et al. 2024, "Gated Delta Networks"), with a state S of (key dim, value dim):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(g_t) S_{t-1})        o_t = q_t^T S_t

Queries and keys are divided by their L2 norm, queries also by the root of their dimension. There may be more value
heads than key heads; consecutive value heads share a key head. Kimi Delta Attention (`kda.py`) is the same with a decay
per channel of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "cuda_recurrent_gated_delta_rule",
    "gated_delta_net_fused_op",
    "gated_delta_net_fused_op_2",
]

# Of the convolution's state and the inputs of the scan. The CUDA kernels keep them in bf16; `install.py` has the engine
# allocate them in this type.
INTERMEDIATE_DTYPE = torch.float32
CHUNK = 64  # tokens
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and their sizes. The engine calls the values of Mamba2 x, its keys B and its queries C."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.values, self.key_dim, self.value_dim

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.values // self.keys


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
        mixed_qkvz: (batch, tokens, ...), per key head [q | k | its v heads | their z]; fp32, as all inputs.
        mixed_ba: (batch, tokens, ...), per key head [b of its value heads | a of them].
        dt_bias: (value heads,), and a_log alike.
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
    """beta = scale * sigmoid(b); log decay g = -exp(a_log) softplus(a + dt_bias) (Gu and Dao 2023, "Mamba").

    Args:
        b: (batch, tokens, value heads), and so are a and the outputs beta and g; arithmetic is fp32.
        dt_bias: (value heads,), and a_log alike.
    """
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
    """The recurrence over many tokens. Arguments and results are those of `chunked_delta_rule`, but:

    Args:
        g: (batch, tokens, value heads) log decay.
        use_qk_l2norm_in_kernel: q and k are yet to be normalised.
    """
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q), normalised(k)
    return chunked_delta_rule(q, k, v, g.unsqueeze(-1), beta, initial_state, output_final_state, _decayed_products)


DecayedProducts = Callable[[Sequence[Tensor], Tensor, Tensor], list[Tensor]]


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    decayed_products: DecayedProducts,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over many tokens, chunk by chunk in its WY form; fp32 inside.

    Within a chunk the updates u_t that are written to the state solve a triangular system, so that a chunk costs a few
    matrix products instead of one step a token (Yang et al. 2024, section 3.3).

    Args:
        q: (batch, tokens, key heads, key dim), and k alike; normalised, but for the root of their dimension.
        v: (batch, tokens, value heads, value dim).
        g: (batch, tokens, value heads, 1 or key dim) log decay.
        beta: (batch, tokens, value heads).
        initial_state: (batch, value heads, key dim, value dim); None is zero.
        decayed_products: from several (..., chunk, key dim) a_i, from keys k_j alike and from the log decay d since the
            start of their chunk, (..., chunk, 1 or key dim), the products sum_c a_ic k_jc exp(d_ic - d_jc) for j <= i,
            else 0, as (..., chunk, chunk).

    Returns:
        Outputs like v, of its type, and the fp32 state after the last token or None.
    """
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    dtype = v.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q = q * key_dim**-0.5
    if value_heads != key_heads:
        q, k = (x.repeat_interleave(value_heads // key_heads, 2) for x in (q, k))

    # To (batch, heads, chunks, chunk, dim); padded tokens change nothing: beta and g are 0.
    padding = -tokens % CHUNK
    q, k, v, g, beta = (
        F.pad(x.transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta.unsqueeze(-1))
    )
    decay_from_start = g.cumsum(3)
    attention, overlaps = decayed_products((q, k), k, decay_from_start)
    system = (beta * overlaps).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((beta * v, beta * k * decay_from_start.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, state_share = solved.split([value_dim, key_dim], dim=-1)
    q_decayed = q * decay_from_start.exp()
    decay_of_chunk = decay_from_start[:, :, :, -1:]
    k_decayed = k * (decay_of_chunk - decay_from_start).exp()
    state_decay = decay_of_chunk.exp().transpose(-1, -2)

    state = torch.zeros(batch, value_heads, key_dim, value_dim)
    if initial_state is not None:
        state = state + initial_state.float()
    out = torch.empty_like(v)
    for chunk in range(v.shape[2]):
        written = update[:, :, chunk] - state_share[:, :, chunk] @ state
        out[:, :, chunk] = q_decayed[:, :, chunk] @ state + attention[:, :, chunk] @ written
        state = state * state_decay[:, :, chunk] + k_decayed[:, :, chunk].transpose(-1, -2) @ written
    out = out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).contiguous().to(dtype)
    return out, state if output_final_state else None


def _decayed_products(rows: Sequence[Tensor], k: Tensor, decay: Tensor) -> list[Tensor]:
    """See `chunked_delta_rule`; one decay for all channels."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    weights = (decay - decay.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    return [(row @ k.transpose(-1, -2)) * weights for row in rows]


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
    """The recurrence over a few tokens, one after the other; inputs of any float type, arithmetic in fp32.

    Args:
        mixed_qkv: (batch, tokens, channels), channels being all q, then all k, then all v; not normalised.
        g: (batch, tokens, value heads) log decay, or (batch, tokens, value heads, key dim).
        beta: (batch, tokens, value heads).
        recurrent_state: (rows, 1, value heads, key dim, value dim), fp32 or fp16, updated in place.
        core_attn_out: out, (batch, tokens, value heads, value dim).
        slots: (batch,) the row of the state that each sequence writes, and reads unless `history` says otherwise. None
            is their order.
        history: the pass may be taken back in part: it reads the rows `slots_in` and leaves them as they are.

    Raises:
        ValueError: `history` without `slots_in`.
    """
    heads = Heads(num_k_heads, num_v_heads, k_head_dim, v_head_dim)
    for index, (row_in, row_out) in enumerate(state_rows(mixed_qkv.shape[0], slots, history, slots_in)):
        state = recurrent_state[row_in, 0].float()
        out, state = scan(mixed_qkv[index], g[index], beta[index], state, heads)
        core_attn_out[index].copy_(out)
        recurrent_state[row_out, 0].copy_(state)


def state_rows(batch: int, slots: Tensor | None, history: bool, slots_in: Tensor | None) -> list[tuple[int, int]]:
    """The rows of the state pool that each sequence reads and writes, see `cuda_recurrent_gated_delta_rule`."""
    written: list[int] = list(range(batch)) if slots is None else slots.tolist()
    if not history:
        return list(zip(written, written, strict=True))
    if slots_in is None:
        raise ValueError("A pass that may be taken back needs to know the rows of the state that it reads.")
    return list(zip(slots_in.tolist(), written, strict=True))


def scan(mixed_qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, value heads, value dim) and the new state of one sequence, both fp32."""
    keys, values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    q, k, v = mixed_qkv.float().split([keys, keys, values], dim=-1)
    q = normalised(q.unflatten(-1, (heads.keys, heads.key_dim))) * heads.key_dim**-0.5
    k = normalised(k.unflatten(-1, (heads.keys, heads.key_dim)))
    if heads.group > 1:
        q, k = (x.repeat_interleave(heads.group, 1) for x in (q, k))
    v = v.unflatten(-1, (heads.values, heads.value_dim))
    decay = g.float().exp().view(*g.shape[:2], -1, 1)
    beta = beta.float().unsqueeze(-1)

    out = torch.empty_like(v)
    for step in range(v.shape[0]):
        state = state * decay[step]
        written = (v[step] - torch.einsum("hk,hkv->hv", k[step], state)) * beta[step]
        state = state + k[step].unsqueeze(-1) * written.unsqueeze(-2)
        out[step] = torch.einsum("hk,hkv->hv", q[step], state)
    return out, state


def normalised(x: Tensor) -> Tensor:
    """x divided by its L2 norm, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
