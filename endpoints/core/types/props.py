"""`/props`, as llama.cpp's server has it: front ends read template and context length here."""

from __future__ import annotations

from pydantic import BaseModel

from backends.messages import ModelInfo
from common.sampling import SamplingParameters
from common.templating import ChatTemplate
from common.version import VERSION

_NEUTRAL = SamplingParameters()


class SamplerDefaults(BaseModel):
    """What holds where a request says nothing and no preset does, under llama.cpp's names."""

    seed: int = -1  # any
    n_predict: int = -1  # all that fit
    temperature: float = _NEUTRAL.temperature
    top_k: int = _NEUTRAL.top_k
    top_p: float = _NEUTRAL.top_p
    min_p: float = _NEUTRAL.min_p
    xtc_probability: float = _NEUTRAL.xtc_probability
    xtc_threshold: float = _NEUTRAL.xtc_threshold
    repeat_penalty: float = _NEUTRAL.repetition_penalty
    repeat_last_n: int = _NEUTRAL.penalty_range
    presence_penalty: float = _NEUTRAL.presence_penalty
    frequency_penalty: float = _NEUTRAL.frequency_penalty
    dry_multiplier: float = _NEUTRAL.dry_multiplier
    dry_base: float = _NEUTRAL.dry_base
    dry_allowed_length: int = _NEUTRAL.dry_allowed_length
    dry_penalty_last_n: int = _NEUTRAL.dry_range or -1
    dry_sequence_breakers: list[str] = _NEUTRAL.dry_sequence_breakers
    ignore_eos: bool = _NEUTRAL.ban_eos_token
    stream: bool = False
    stop: list[str] = []


class GenerationDefaults(BaseModel):
    n_ctx: int
    params: SamplerDefaults = SamplerDefaults()


class Modalities(BaseModel):
    vision: bool
    audio: bool = False


class Props(BaseModel):
    """
    Attributes:
        model_path: the model's folder, without what it lies in.
        bos_token: empty where the tokenizer has none, as eos_token.
        chat_template: empty where the model cannot chat.
    """

    default_generation_settings: GenerationDefaults
    total_slots: int
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str = f"Waypoint {VERSION}"

    @classmethod
    def of(cls, info: ModelInfo, template: ChatTemplate | None) -> Props:
        special_tokens = template.special_tokens if template is not None else {}
        return cls(
            default_generation_settings=GenerationDefaults(n_ctx=info.max_seq_len),
            total_slots=info.max_batch_size,
            model_path=info.name,
            chat_template=template.source if template is not None else "",
            bos_token=special_tokens.get("bos_token", ""),
            eos_token=special_tokens.get("eos_token", ""),
            modalities=Modalities(vision=info.use_vision),
        )
