"""Sampling parameters."""

from __future__ import annotations

import msgspec


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters of one request; the defaults are neutral.

    The names are TabbyAPI's, the order of the steps is in `backends/exllamav3/sampler.py`.
    """

    temperature: float = 1.0  # 0 is greedy
    temperature_last: bool = False  # apply the temperature after the truncating samplers
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_range: int = -1  # tokens; negative: the whole context
    repetition_decay: int = 0  # tokens over which a penalty fades out past the range
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0  # tokens; 0: the whole context
    dry_sequence_breakers: list[str] = []
    adaptive_target: float = 1.0  # below 1: adaptive-P
    adaptive_decay: float = 0.9
    logit_bias: dict[int, float] = {}
    banned_tokens: list[int] = []
    allowed_tokens: list[int] = []  # empty: all
    ban_eos_token: bool = False
    loop_detect_window: int = 800  # tokens; below 2: off
