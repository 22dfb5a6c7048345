"""What was in force for an answer, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator

from backends.messages import ModelInfo
from common.generation import GenerationRequest
from common.sampling import NEVER
from endpoints.LlamaCpp.types.request import CUTS, CompletionFields
from endpoints.LlamaCpp.types.response import GenerationSettings, TokenBias


def generation_settings(
    request: GenerationRequest, n_predict: int, fields: CompletionFields, info: ModelInfo
) -> GenerationSettings:
    """
    Args:
        n_predict: -1 for all that fit, 0 for nothing.
        fields: of the body, with presets applied.
    """
    p = request.sampling
    return GenerationSettings(
        n_ctx=info.max_seq_len,
        model=info.name,
        seed=-1 if request.seed is None else request.seed,
        n_predict=n_predict,
        max_tokens=n_predict,
        min_tokens=request.min_tokens,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        xtc_probability=p.xtc_probability,
        xtc_threshold=p.xtc_threshold,
        repeat_penalty=p.repetition_penalty,
        repeat_last_n=p.penalty_range,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        dry_multiplier=p.dry_multiplier,
        dry_base=p.dry_base,
        dry_allowed_length=p.dry_allowed_length,
        dry_penalty_last_n=p.dry_range or -1,
        dry_sequence_breakers=p.dry_sequence_breakers,
        adaptive_target=p.adaptive_target,
        adaptive_decay=p.adaptive_decay,
        ignore_eos=p.ban_eos_token,
        samplers=list(_samplers(fields, temperature_last=p.temperature_last)),
        logit_bias=[
            TokenBias(token=token, bias=None if bias <= NEVER else bias) for token, bias in p.logit_bias.items()
        ],
        stop=request.stop_strings,
        grammar=fields.grammar_string or "",
        json_schema=fields.json_schema,
        stream=fields.stream,
        n_probs=fields.n_probs,
        timings_per_token=fields.timings_per_token,
    )


def _samplers(fields: CompletionFields, *, temperature_last: bool) -> Iterator[str]:
    """Those that the body leaves on, in the engine's order."""
    chain = (*CUTS, "temperature") if temperature_last else ("temperature", *CUTS)
    for name in ("penalties", "dry", *chain, "xtc", "adaptive_p"):
        if fields.samplers is None or name in fields.samplers:
            yield name
