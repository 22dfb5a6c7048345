"""The short causal convolution in front of a recurrent layer, and its state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    transpose_output: bool = False,
    history: bool = False,
    token_major: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """silu of a depthwise convolution over the remembered columns and x; the state moves on to the newest ones.

    Args:
        x: (batch, channels, tokens), or (batch, tokens, channels) with `token_major`.
        conv_state: (slots, channels, size), size at least the kernel's width. The first `width` columns are the state.
        slots: (batch,) each sequence's slot.
        weight: (channels, width).
        history: a pass that may be taken back in part: the newest columns, as many as there are, go to the state's end,
            so that the engine can copy any `width` of them to its beginning.
        out_dtype: x's where None.

    Returns:
        (batch, channels, tokens), or (batch, tokens, channels) with `transpose_output`.
    """
    if token_major:
        x = x.transpose(1, 2)
    channels, tokens = x.shape[1:]
    width, size = weight.shape[-1], conv_state.shape[-1]
    index = slots.long()
    columns = torch.cat((conv_state[index, :, :width].float(), x.float()), dim=-1)
    if history:
        kept = min(size, columns.shape[-1])
        conv_state[index, :, size - kept :] = columns[..., -kept:].to(conv_state.dtype)
    else:
        conv_state[index, :, :width] = columns[..., -width:].to(conv_state.dtype)

    # The first column is the oldest: no output of this pass reaches back to it.
    out = F.conv1d(
        columns[..., -(tokens + width - 1) :],
        weight.float().unsqueeze(1),
        bias.float() if bias is not None else None,
        groups=channels,
    )
    out = F.silu(out).to(out_dtype or x.dtype)
    return out.transpose(1, 2).contiguous() if transpose_output else out
