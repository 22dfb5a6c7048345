"""Choosing a token: noise, filters and masks; gumbel.cu, sampling_basic.cu and sampling_fused.cu.

A sample from softmax(x) is the argmax of x plus Gumbel noise (Maddison et al. 2014, "A* Sampling"). The noise of a seed
is always the same, but not that of a GPU. Logits come in fp32 or fp16; arithmetic is fp32, and what is written has the
type of its tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FUSED_SAMPLER_HIST_STRIDE",
    "FUSED_SAMPLER_MAX_BLOCKS",
    "adaptivep_gumbel_noise_f32",
    "apply_logit_bitmask",
    "fused_sampler",
    "gumbel_noise_f16",
    "gumbel_noise_f32",
    "gumbel_noise_log",
]

# Sizes of buffers that the engine hands over and nobody fills here.
FUSED_SAMPLER_MAX_BLOCKS = 1
FUSED_SAMPLER_HIST_STRIDE = 1

# Modes of `fused_sampler`, and the bits of its `filters`.
GREEDY = 0
MIN_P_ONLY = 2
FILTERED = 3
TOP_K = 1
TOP_P = 2
MIN_P = 4

SMALLEST_PROBABILITY = 1e-8  # below it adaptive-P never chooses a token
WORD_BITS = 32


def gumbel_noise_f32(logits_in: Tensor, logits: Tensor, random: int) -> None:
    """logits = logits_in + noise, of any one shape, and may be the same; `random` is the seed of the noise."""
    logits.copy_(logits_in.float() + _gumbel(logits_in, random))


def gumbel_noise_f16(logits_in: Tensor, logits: Tensor, random: int) -> None:
    """As `gumbel_noise_f32`; on a GPU, what is in fp16."""
    gumbel_noise_f32(logits_in, logits, random)


def gumbel_noise_log(probs: Tensor, logits: Tensor, random: int) -> None:
    """logits = ln(probs) + noise, see `gumbel_noise_f32`."""
    logits.copy_(probs.float().log() + _gumbel(probs, random))


def adaptivep_gumbel_noise_f32(
    probs_in: Tensor,
    logits: Tensor,
    random: int,
    adapted_target: float,
    inv_width: float,
    peak_logit_value: float,
    sharpness: float,
) -> None:
    """Noisy logits that peak where a token's probability is the target: peak - sharpness d^2 / (d + 1) + noise.

    The formula is the engine's own, of its sampler `SS_AdaptiveP`.

    Args:
        probs_in: of any shape; the output logits alike. Tokens below 1e-8 get -inf.
        random: seed of the noise.
        adapted_target: a probability p'; d is |p - p'| * inv_width.
        peak_logit_value: the peak.
    """
    distance = (probs_in - adapted_target).abs() * inv_width
    shaped = peak_logit_value - sharpness * distance.square() / (distance + 1.0)
    noisy = shaped + _gumbel(probs_in, random)
    logits.copy_(noisy.masked_fill(probs_in < SMALLEST_PROBABILITY, float("-inf")))


def apply_logit_bitmask(logits_in: Tensor, logits_out: Tensor, bitmask: Tensor) -> None:
    """Set logits whose bit is 0, or that the mask does not reach, to -inf.

    Args:
        logits_in: (batch, vocabulary); the output logits_out alike.
        bitmask: (1 or batch, words) int32, 32 tokens a word, the lowest bit first.
    """
    allowed = _allowed(bitmask, logits_in.shape[-1])
    logits_out.copy_(logits_in.masked_fill(~allowed, float("-inf")))


def fused_sampler(
    logits: Tensor,
    logit_mask: Tensor | None,
    logit_bitmask: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    size: int,
    inv_temp: float,
    minp_log: float,
    random: int,
    mode: int,
    filters: int,
    top_k: int,
    top_p: float,
    inv_temp_filter: float,
    histogram: Tensor | None = None,
) -> None:
    """Mask, filter, divide by the temperature and choose.

    Args:
        logits: (batch, vocabulary), of which the first `size` count.
        logit_mask: (1 or batch, at least size), added to the logits.
        logit_bitmask: see `apply_logit_bitmask`. At most one of the two masks is given.
        out: out, (batch, 1) int64 token ids.
        workspace: scratch memory of a GPU's threads, like histogram; not used.
        inv_temp: 1 / temperature of the sample.
        minp_log: ln(min-p), a bound below the largest logit (Nguyen et al. 2024, "Turning Up the Heat").
        random: seed of the noise.
        mode: 0 greedy, 1 unfiltered, 2 min-p alone, 3 the filters named by the bits of `filters`, in the order min-p,
            top-k, top-p.
        top_k: tokens as good as the last of these stay, too.
        top_p: see `_top_p`.
        inv_temp_filter: 1 / temperature at which top-p adds up.
    """
    x = logits[..., :size].float()
    if logit_mask is not None:
        x = x + logit_mask[..., :size].float()
    if logit_bitmask is not None:
        x = x.masked_fill(~_allowed(logit_bitmask, size), float("-inf"))
    if mode != GREEDY:
        if mode == MIN_P_ONLY or (mode == FILTERED and filters & MIN_P):
            x = x.masked_fill(x < x.amax(-1, keepdim=True) + minp_log, float("-inf"))
        if mode == FILTERED and filters & TOP_K and 0 < top_k < size:
            x = x.masked_fill(x < x.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
        if mode == FILTERED and filters & TOP_P and top_p < 1.0:
            x = _top_p(x, top_p, inv_temp_filter)
        x = x * inv_temp + _gumbel(x, random)
    out.copy_(x.argmax(-1).view(out.shape))


def _top_p(x: Tensor, top_p: float, inv_temp: float) -> Tensor:
    """Keep the likeliest tokens up to the one with which their probabilities reach `top_p` (Holtzman et al. 2020).

    Which of several that are as likely, is for the sort to say.
    """
    ordered = x.sort(dim=-1, descending=True)
    probabilities = (ordered.values * inv_temp).softmax(-1)
    beyond = probabilities.cumsum(-1) - probabilities > top_p
    return x.masked_fill(torch.zeros_like(beyond).scatter_(-1, ordered.indices, beyond), float("-inf"))


def _gumbel(like: Tensor, seed: int) -> Tensor:
    """-ln(-ln(u)), u uniform between 0 and 1."""
    uniform = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed))
    smallest = torch.finfo(torch.float).tiny
    return -torch.log(-torch.log(uniform.clamp(smallest, 1.0 - 2.0**-24)))


def _allowed(bitmask: Tensor, size: int) -> Tensor:
    """(1 or batch, size) bool."""
    bits = (bitmask.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=bitmask.dtype)) & 1
    allowed = bits.flatten(-2).bool()[..., :size]
    return torch.nn.functional.pad(allowed, (0, size - allowed.shape[-1]))
