"""Layers with a recurrent state: Gated DeltaNet, short convolutions, Mamba 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.writing import edit_config, language_model, rename_weights, write

GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def make_hybrid(directory: Path) -> Path:
    """Qwen3.5: three Gated DeltaNet layers, then one of attention."""
    return _qwen3_5(directory)


def make_deep_hybrid(directory: Path) -> Path:
    """The same with 16 layers, and somewhat wider; 9 MB. For benchmarks."""
    return _qwen3_5(directory, hidden_size=160, intermediate_size=320, num_hidden_layers=16)


def qwen3_5(**settings: Any) -> dict[str, Any]:
    """Settings of the hybrid's language model, with changes."""
    sizes = {"num_hidden_layers": 4, "head_dim": 64, "max_position_embeddings": 32768}
    return language_model(**(GATED_DELTA_NET | sizes | settings))


def _qwen3_5(directory: Path, **settings: Any) -> Path:
    write(directory, "Qwen3_5ForCausalLM", qwen3_5(**settings))
    return rename_weights(directory, r"^model\.", "model.language_model.")  # as beside a vision tower


def make_conv(directory: Path) -> Path:
    """LFM2: short convolutions, and attention in layers 2 and 5."""
    settings = language_model(num_hidden_layers=6, full_attn_idxs=[2, 5], block_auto_adjust_ff_dim=False)
    return write(directory, "Lfm2ForCausalLM", settings)


def make_nemotron_h(directory: Path) -> Path:
    """Nemotron-H: Mamba 2, attention, dense layers and experts beside a shared one."""
    settings = language_model(
        layers_block_type=["linear_attention", "mlp", "linear_attention", "moe", "full_attention", "moe"],
        head_dim=32,
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5,
        time_step_limit=(0.001, float("inf")),  # transformers has time_step_min in its place, the same by default
    )
    write(directory, "NemotronHForCausalLM", settings, varied=True)
    return edit_config(directory, _name_nemotron_h_layers)


def _name_nemotron_h_layers(config: dict[str, Any]) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    for key in ("layers_block_type", "mtp_layers_block_type"):
        config[key] = [names.get(kind, kind) for kind in config[key]]
    # All that exllamav3 1.6.4 reads.
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config["layers_block_type"])
