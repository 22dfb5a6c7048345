"""Taking back speculated tokens of a recurrent layer. The engine names memory by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.exllamav3.cpu import delta_net, mamba2
from backends.exllamav3.cpu.delta_net import INTERMEDIATE_DTYPE, Heads
from backends.exllamav3.cpu.memory import tensor_at

__all__ = ["ConvRewindJob", "ScanReplayJob", "batched_conv_rewind", "batched_scan_replay"]

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Heads], tuple[Tensor, Tensor]]

# By the engine's number: Gated DeltaNet, Mamba2, KDA.
SCANS: tuple[Scan, ...] = (delta_net.scan, mamba2.scan, delta_net.scan)
KDA = 2


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

    channels: int
    g: int
    beta: int  # dt of Mamba2
    state_in: int
    state_out: int
    skip: int  # D of Mamba2, which no state depends on
    tokens: int
    token_stride: int = 1


def batched_conv_rewind(jobs: Sequence[ConvRewindJob], device_index: int | None) -> None:
    """Run rewind jobs, whose states are in `INTERMEDIATE_DTYPE`; the device is None, the CPU."""
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
    """Run replay jobs: inputs are in `INTERMEDIATE_DTYPE`, g is fp32.

    Args:
        device_index: None, the CPU.
        kind: of the recurrence, see `SCANS`; heads and sizes as of `delta_net.cuda_recurrent_gated_delta_rule`.
        state_half: the states are fp16 instead of fp32.
    """
    heads = Heads(num_k_heads, num_v_heads, k_head_dim, v_head_dim)
    decay_shape = (num_v_heads, k_head_dim) if kind == KDA else (num_v_heads,)
    state_dtype = torch.half if state_half else torch.float
    for job in jobs:
        _, state = SCANS[kind](
            _staged(job, job.channels, INTERMEDIATE_DTYPE, (heads.channels,)),
            _staged(job, job.g, torch.float, decay_shape),
            _staged(job, job.beta, INTERMEDIATE_DTYPE, (num_v_heads,)),
            tensor_at(job.state_in, state_dtype, heads.state_shape).float(),
            heads,
        )
        tensor_at(job.state_out, state_dtype, heads.state_shape).copy_(state)


def _staged(job: ScanReplayJob, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """(tokens, *shape) of what a pass has staged."""
    rows = tensor_at(address, dtype, ((job.tokens - 1) * job.token_stride + 1, *shape))
    return rows[:: job.token_stride]
