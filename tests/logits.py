"""Logits of whole models, ours and those of transformers in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.exllamav3.engine import Cache, CacheLayer_quant, Config, MMEmbedding, Model
from common.config_models import PAGE_TOKENS
from tests.engines import random_ids
from tests.models import VOCABULARY

CHUNK = 100  # tokens that are processed at a time where there is a cache
UNQUANTISED = (16, 16)
# Names of a prediction head's weights, as published and as transformers' MtpLayer has them.
PREDICTION_HEAD = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.layers.0.": "mtp_block.",
    "mtp.norm.": "post_norm.",
}


def engine_logits(
    directory: Path, ids: Tensor, cache_bits: tuple[int, int] | None = None, images: Sequence[MMEmbedding] = ()
) -> Tensor:
    """(1, tokens, vocabulary).

    Args:
        cache_bits: of keys and of values, in a cache; None for no cache.
        images: whose ids the prompt holds.
    """
    model = Model.from_config(Config.from_directory(str(directory)))
    parameters: dict[str, Any] = {"attn_mode": "flash_attn_nc", "indexed_embeddings": images}
    chunks = [ids]
    if cache_bits:
        size = -(-ids.shape[1] // PAGE_TOKENS) * PAGE_TOKENS
        k_bits, v_bits = cache_bits
        packed = {"layer_type": CacheLayer_quant, "k_bits": k_bits, "v_bits": v_bits}
        cache = Cache(model, max_num_tokens=size, **({} if cache_bits == UNQUANTISED else packed))
        parameters |= {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (1, size)}
        chunks = [*ids.split(CHUNK, dim=1)]
    model.load(progressbar=False)
    if images and model.caps.get("mrope"):
        parameters["inv_freq"], _ = model.g_rope.get_mrope_freqs(ids, images, ids.shape[1])
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
        # Named as exllamav3 expects them, see tests/models/recurrent.py.
        model.load_state_dict({name.replace("language_model.", ""): weight for name, weight in weights.items()})
    else:
        model = kind.from_pretrained(directory, config=settings, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model.eval()(ids).logits
    return logits[..., :VOCABULARY]


def engine_draft_logits(directory: Path, ids: Tensor) -> Tensor:
    """Of a prediction head, (1, tokens - 1, vocabulary): from each token but the first, and the state before it."""
    config = Config.from_directory(str(directory))
    model, head = Model.from_config(config), Model.from_config(config, component="mtp")
    head.attach_to(model)
    model.load(progressbar=False)
    head.load(progressbar=False)
    parameters: dict[str, Any] = {"attn_mode": "flash_attn_nc"}
    with torch.inference_mode():
        exported = parameters | head.draft_verifier_params
        model.forward(ids, exported)
        states = exported["export_states"][-1][:, :-1]
        drafted = head.forward(ids[:, 1:], parameters | {"target_hidden": states})
        logits: Tensor = model.modules[model.logit_layer_idx].forward(drafted, {})
    head.unload()
    model.unload()
    return logits.float()[..., :VOCABULARY]


def reference_draft_logits(directory: Path, ids: Tensor) -> Tensor:
    """The same with transformers' layer for such heads, in fp32."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText
    from transformers.modeling_layers import MtpLayer

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    decoder = model.get_decoder()
    head = MtpLayer(decoder.config, type(decoder.layers[-1]), type(decoder.norm), len(decoder.layers) - 1)
    weights = load_file(directory / "model.safetensors").items()
    head.load_state_dict(
        {
            part + name.removeprefix(published): weight
            for published, part in PREDICTION_HEAD.items()
            for name, weight in weights
            if name.startswith(published)
        }
    )
    with torch.inference_mode():
        states = decoder(ids).last_hidden_state[:, :-1]
        embeddings = decoder.embed_tokens(ids[:, 1:])
        positions = torch.arange(states.shape[1]).unsqueeze(0)
        rotations = decoder.rotary_emb(embeddings, positions)
        drafted = head.eval()(
            embeddings, states, position_embeddings=rotations, attention_mask=None, position_ids=positions, cache=None
        )
        logits: Tensor = model.lm_head(drafted)
    return logits[..., :VOCABULARY]


def prompt(tokens: int) -> Tensor:
    return random_ids(tokens, seed=1)
