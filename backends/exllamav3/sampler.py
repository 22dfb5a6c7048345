"""Sampling parameters -> the engine's sampler."""

from __future__ import annotations

from backends.exllamav3.engine import (
    SS_DRY,
    SS_XTC,
    CustomSampler,
    SS_AdaptiveP,
    SS_Argmax,
    SS_BanTokens,
    SS_Base,
    SS_LogitBias,
    SS_MinP,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
    Tokenizer,
    dry_sequence_breaker_tokens,
)
from common.errors import InvalidRequest
from common.sampling import SamplingParameters

WHOLE_CONTEXT = 10**8  # tokens; the engine's penalties know no "everything"
# A lower one is greedy: logits divided by it would no longer be numbers.
LOWEST_TEMPERATURE = 1e-5


def build_sampler(parameters: SamplingParameters, tokenizer: Tokenizer, eos_token_ids: list[int]) -> CustomSampler:
    """The chain of steps, in TabbyAPI's order, with DRY beside the other penalties.

    Steps with neutral values are dropped by the engine. Adaptive-P chooses by itself, also at temperature 0, where it
    sees the distribution as it is.
    """
    p = parameters
    penalty_range = WHOLE_CONTEXT if p.penalty_range < 0 else p.penalty_range
    breakers = (
        dry_sequence_breaker_tokens(tokenizer, tuple(p.dry_sequence_breakers)) if p.dry_sequence_breakers else None
    )
    penalties: list[SS_Base] = [
        SS_LogitBias(p.logit_bias),
        SS_RepP(p.repetition_penalty, penalty_range, p.repetition_decay),
        SS_PresFreqP(p.presence_penalty, p.frequency_penalty, penalty_range, p.repetition_decay),
        SS_DRY(p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_range, breakers, tokenizer),
        SS_BanTokens(_banned(p, tokenizer, eos_token_ids)),
    ]
    adaptive = p.adaptive_target < 1.0
    greedy = p.temperature < LOWEST_TEMPERATURE
    if greedy and not adaptive:
        return CustomSampler([*penalties, SS_Argmax()])

    temperature = 1.0 if greedy else p.temperature
    return CustomSampler(
        [
            *penalties,
            SS_Temperature(1.0 if p.temperature_last else temperature),
            SS_TopK(p.top_k),
            SS_TopP(p.top_p),
            SS_MinP(p.min_p),
            SS_Temperature(temperature if p.temperature_last else 1.0),
            SS_XTC(p.xtc_probability, p.xtc_threshold, tokenizer=tokenizer),
            SS_AdaptiveP(p.adaptive_target, p.adaptive_decay) if adaptive else SS_Sample(),
        ]
    )


def _banned(parameters: SamplingParameters, tokenizer: Tokenizer, eos_token_ids: list[int]) -> list[int]:
    vocabulary = range(tokenizer.actual_vocab_size)
    banned = set(parameters.banned_tokens)
    if parameters.ban_eos_token:
        banned.update(eos_token_ids)
    if parameters.allowed_tokens:
        banned.update(set(vocabulary).difference(parameters.allowed_tokens))
    if banned.issuperset(vocabulary):
        raise InvalidRequest("allowed_tokens leaves no token that is not banned.", param="allowed_tokens")
    return sorted(banned)
