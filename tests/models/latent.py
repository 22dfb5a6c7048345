"""Multi-head latent attention, and experts beside a shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.experts import SHARED_EXPERTS
from tests.models.writing import edit_config, language_model, rename_weights, write


def make_deepseek(directory: Path) -> Path:
    """DeepSeek-V3 as Kimi-K2 and Moonlight have it: one group of experts."""
    settings = _latent_attention(num_hidden_layers=3, q_lora_rank=96, first_k_dense_replace=1, num_mtp_layers=0)
    return write(directory, "DeepseekV3ForCausalLM", settings, varied=True)


def make_glm_moe_dsa(directory: Path) -> Path:
    """GLM-5: attention to the 128 tokens that an indexer chooses; a dense layer, then experts."""
    settings = _latent_attention(
        num_hidden_layers=2,
        q_lora_rank=96,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=128,
        first_k_dense_replace=1,
    )
    return write(directory, "GlmMoeDsaForCausalLM", settings, varied=True)


def make_kimi_linear(directory: Path) -> Path:
    """Kimi Linear: three KDA layers, then one of attention; experts from layer 1."""
    settings = _latent_attention(
        num_hidden_layers=4,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_num_heads=4,
        linear_head_dim=32,
    )
    write(directory, "KimiLinearForCausalLM", settings, varied=True)
    rename_weights(directory, r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.")
    return edit_config(directory, _name_kimi_linear_layers)


def make_bailing_hybrid(directory: Path) -> Path:
    """Ling 3: three layers of KDA with a bounded decay, then one of attention with a gate; groups of experts."""
    settings = _latent_attention(
        num_hidden_layers=4,
        layer_group_size=4,
        head_dim=32,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        n_group=4,
        topk_group=2,
    )
    write(directory, "BailingHybridForCausalLM", settings, varied=True)
    rename_weights(directory, r"\.([0-2])\.attention\.dense\.", r".\1.attention.o_proj.")  # the layers with KDA only
    return edit_config(directory, _name_bailing_hybrid_settings)


def _latent_attention(**settings: Any) -> dict[str, Any]:
    sizes = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    return language_model(**(SHARED_EXPERTS | sizes | settings))


def _name_kimi_linear_layers(config: dict[str, Any]) -> None:
    def layers(kind: str) -> list[int]:
        return [number for number, layer_type in enumerate(config["layer_types"], 1) if layer_type == kind]

    config["linear_attn_config"] = {
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "kda_layers": layers("linear_attention"),
        "full_attn_layers": layers("full_attention"),
    }
    config["first_k_dense_replace"] = config["mlp_layer_types"].index("sparse")


def _name_bailing_hybrid_settings(config: dict[str, Any]) -> None:
    config.update(
        architectures=["BailingMoeV3ForCausalLM"],
        gated_attention_proj_granularity_type="head_wise",
        head_dim=config["linear_head_dim"],
        n_group=config["num_expert_group"],
        num_experts_per_tok=config["num_experts_per_token"],
    )
