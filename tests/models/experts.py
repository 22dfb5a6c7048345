"""Mixtures of experts, two of eight a token, behind attention with grouped heads or a recurrent layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models.recurrent import GATED_DELTA_NET
from tests.models.writing import edit_config, edit_weights, language_model, write

if TYPE_CHECKING:
    from torch import Tensor

# As DeepSeek-V3 has them, and those who followed.
SHARED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}


def make_moe(directory: Path) -> Path:
    """Qwen3-MoE: experts in every layer, none of them shared."""
    settings = language_model(
        moe_intermediate_size=128, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    write(directory, "Qwen3MoeForCausalLM", settings)
    return edit_config(directory, lambda config: config.update(num_experts=config["num_local_experts"]))


def make_glm4_moe(directory: Path) -> Path:
    """GLM-4.5: a dense layer, then experts beside a shared one."""
    settings = language_model(
        num_hidden_layers=3, use_qk_norm=True, first_k_dense_replace=1, num_mtp_layers=0, **SHARED_EXPERTS
    )
    return write(directory, "Glm4MoeForCausalLM", settings, varied=True)


def make_qwen3_next(directory: Path) -> Path:
    """Qwen3-Next: three Gated DeltaNet layers, then one of attention; the shared expert has a gate."""
    settings = language_model(
        num_hidden_layers=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **GATED_DELTA_NET,
    )
    return write(directory, "Qwen3NextForCausalLM", settings, varied=True)


def make_lfm2_moe(directory: Path) -> Path:
    """LFM2 with experts: short convolutions, and attention in layer 2."""
    settings = language_model(
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_dense_layers=1,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=2,
    )
    return write(directory, "Lfm2MoeForCausalLM", settings, varied=True)


def make_gpt_oss(directory: Path) -> Path:
    """gpt-oss: windows and sinks in attention, a router and experts with biases."""
    settings = language_model(
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=512,
        max_position_embeddings=131072,  # as many times the original ones as YaRN's factor
    )
    write(directory, "GptOssForCausalLM", settings, varied=True)
    return edit_weights(directory, _with_separate_experts)


def _with_separate_experts(fused: dict[str, Tensor]) -> dict[str, Tensor]:
    """Beside the weights of all experts in one, which the engine reads in MXFP4 only, those of each, as in EXL3."""
    import torch

    separate = {}
    for name, weights in fused.items():
        layer, experts, projection = name.partition(".experts.")
        if not experts:
            continue
        biases = projection.endswith("_bias")
        for number, weight in enumerate(weights if biases else weights.mT):
            parts = {"down_proj": weight}
            if projection.startswith("gate_up_proj"):
                parts = {"gate_proj": weight[0::2], "up_proj": weight[1::2]}
            for part, values in parts.items():
                name = f"{layer}.experts.{number}.{part}.{'bias' if biases else 'weight'}"
                separate[name] = values.clone(memory_format=torch.contiguous_format)
    return fused | separate
