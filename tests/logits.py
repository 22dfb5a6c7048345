"""Logits of whole models, ours and those of transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.exllamav3.engine import Cache, CacheLayer_quant, Config, Model
from common.config_models import PAGE_TOKENS
from tests.engines import random_ids
from tests.models import VOCABULARY

CHUNK = 100  # tokens that are processed at a time where there is a cache


def engine_logits(directory: Path, ids: Tensor, cache_bits: tuple[int, int] | None = None) -> Tensor:
    """(1, tokens, vocabulary).

    Args:
        cache_bits: of keys and of values, in a quantised cache; None for no cache. The first chunk attends to what is
            not packed yet, so that only those after it show what packing costs.
    """
    model = Model.from_config(Config.from_directory(str(directory)))
    parameters: dict[str, Any] = {"attn_mode": "flash_attn_nc"}
    chunks = [ids]
    if cache_bits:
        size = -(-ids.shape[1] // PAGE_TOKENS) * PAGE_TOKENS
        k_bits, v_bits = cache_bits
        cache = Cache(model, max_num_tokens=size, layer_type=CacheLayer_quant, k_bits=k_bits, v_bits=v_bits)
        parameters = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, size)}
        chunks = [*ids.split(CHUNK, dim=1)]
    model.load(progressbar=False)
    logits: list[Tensor] = []
    with torch.inference_mode():
        for index, chunk in enumerate(chunks):
            past = {"past_len": index * CHUNK} if cache_bits else {}
            logits.append(model.forward(chunk, parameters | past))
    model.unload()
    return torch.cat(logits, dim=1).float()[..., :VOCABULARY]


def reference_logits(directory: Path, ids: Tensor, **config: Any) -> Tensor:
    """Of transformers in fp32, with changes to the model's configuration."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = AutoConfig.from_pretrained(directory, **config)
    kind = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
    if settings.model_type == "qwen3_5_text":
        model = kind.from_config(settings, dtype=torch.float32)  # type: ignore[no-untyped-call]  # it has no types
        weights = load_file(directory / "model.safetensors")
        # Named as exllamav3 expects them, see tests/models.py.
        model.load_state_dict({name.replace("language_model.", ""): weight for name, weight in weights.items()})
    else:
        model = kind.from_pretrained(directory, config=settings, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model.eval()(ids).logits
    return logits[..., :VOCABULARY]


def prompt(tokens: int) -> Tensor:
    return random_ids(tokens, seed=1)
