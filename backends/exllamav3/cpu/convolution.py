"""The short causal convolution in front of a recurrent layer, and its state (Gu and Dao 2023, "Mamba", figure 3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.exllamav3.cpu.delta_net import INTERMEDIATE_DTYPE


def prepare(modules: Iterable[Any]) -> None:
    """Widen the weights of LFM2's short convolutions that have just been loaded: the engine computes in their type."""
    for module in modules:
        if type(module).__name__ == "ShortConv":
            module.conv1d_weight = module.conv1d_weight.float()
            module.conv1d_bias = None if module.conv1d_bias is None else module.conv1d_bias.float()


def causal_conv1d_update(
    mixed_qkv: Tensor,
    conv_state: Tensor | None,
    recurrent_slots: Tensor | None,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    history: bool = False,
    params: dict[str, Any] | None = None,
    token_major: bool = False,
    incremental: bool = False,
) -> Tensor:
    """silu of a depthwise convolution over the remembered columns and the new ones; the state moves on to the newest.

    What `conv1d_update_kernel` in gdn.cu does, and its counterpart in Triton. Inputs are of any float type; arithmetic
    is fp32.

    Args:
        mixed_qkv: (batch, channels, tokens), or (batch, tokens, channels) with `token_major`.
        conv_state: (slots, channels, size), size at least the kernel's width; written to. The first `width` columns are
            the state. None is zeros that nobody keeps.
        recurrent_slots: (batch,) each sequence's slot; None is their order.
        conv1d_weight: (channels, width).
        conv1d_bias: (channels,).
        params: of the pass; not used, here or by the engine.
        history: a pass that may be taken back in part: the newest columns, as many as there are, go to the state's end,
            so that the engine can copy any `width` of them to its beginning.
        incremental: with `history`, one more step of such a pass: the state's end is what comes before it.

    Returns:
        (batch, tokens, channels), fp32.
    """
    x = (mixed_qkv.transpose(1, 2) if token_major else mixed_qkv).float()
    batch, channels, tokens = x.shape
    width = conv1d_weight.shape[-1]
    if conv_state is None:
        conv_state, recurrent_slots = torch.zeros(batch, channels, width), None
    size = conv_state.shape[-1]
    index = torch.arange(batch) if recurrent_slots is None else recurrent_slots.long()
    past = conv_state[index] if incremental else conv_state[index, :, :width]
    columns = torch.cat((past.float(), x), dim=-1)
    if history:
        kept = min(size, columns.shape[-1])
        conv_state[index, :, size - kept :] = columns[..., -kept:].to(conv_state.dtype)
    else:
        conv_state[index, :, :width] = columns[..., -width:].to(conv_state.dtype)

    # The first column is the oldest: no output of this pass reaches back to it. One product for each column of the
    # kernel takes less time than torch's convolution with as many groups as channels.
    inputs, weight = columns[..., columns.shape[-1] - tokens - width + 1 :], conv1d_weight.float()
    out = inputs[..., :tokens] * weight[:, :1]
    for column in range(1, width):
        out.addcmul_(inputs[..., column : column + tokens], weight[:, column : column + 1])
    if conv1d_bias is not None:
        out += conv1d_bias.float().unsqueeze(-1)
    return F.silu(out, inplace=True).transpose(1, 2).to(INTERMEDIATE_DTYPE).contiguous()
