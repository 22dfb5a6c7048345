"""Attention and an MLP in every layer."""

from __future__ import annotations

from pathlib import Path

from tests.models.writing import language_model, write


def make_llama(directory: Path) -> Path:
    """Its sizes are no multiples of 128, as those of SmolLM2 are not."""
    settings = language_model(
        hidden_size=192, intermediate_size=448, num_hidden_layers=4, num_attention_heads=6, head_dim=32
    )
    return write(directory, "LlamaForCausalLM", settings, add_bos=True)


def make_apertus(directory: Path) -> Path:
    """The activation xIELU in an MLP without gates."""
    return write(directory, "ApertusForCausalLM", language_model(num_hidden_layers=4), varied=True)


def make_sliding(directory: Path) -> Path:
    """AFMoE, with dense layers: three with a window of 512 tokens, then a global one, twice."""
    settings = language_model(
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_dense_layers=8,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        sliding_window=512,
    )
    return write(directory, "AfmoeForCausalLM", settings)
