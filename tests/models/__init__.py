"""Tiny models with random weights for the real engine, the same on every machine.

Each maker writes a folder as one downloads it: config, weights in bf16, tokenizer, chat template; under 6 MB. The rows
of special tokens in the output layer are zero, so that a greedy answer never ends by chance.
"""

from tests.models.dense import make_apertus, make_llama, make_sliding
from tests.models.experts import make_glm4_moe, make_gpt_oss, make_lfm2_moe, make_moe, make_qwen3_next
from tests.models.latent import make_bailing_hybrid, make_deepseek, make_glm_moe_dsa, make_kimi_linear
from tests.models.recurrent import make_conv, make_deep_hybrid, make_hybrid, make_nemotron_h
from tests.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCABULARY, corpus, write_tokenizer
from tests.models.vision import (
    announce_prediction_head,
    make_gemma3,
    make_gemma4,
    make_glm4v,
    make_lfm2_vl,
    make_mistral3,
    make_mtp,
    make_qwen2_5_vl,
    make_qwen3_vl,
    make_vision,
)
from tests.models.writing import MakeModel

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "SPECIAL_TOKENS",
    "VOCABULARY",
    "MakeModel",
    "announce_prediction_head",
    "corpus",
    "make_apertus",
    "make_bailing_hybrid",
    "make_conv",
    "make_deep_hybrid",
    "make_deepseek",
    "make_gemma3",
    "make_gemma4",
    "make_glm4_moe",
    "make_glm4v",
    "make_glm_moe_dsa",
    "make_gpt_oss",
    "make_hybrid",
    "make_kimi_linear",
    "make_lfm2_moe",
    "make_lfm2_vl",
    "make_llama",
    "make_mistral3",
    "make_moe",
    "make_mtp",
    "make_nemotron_h",
    "make_qwen2_5_vl",
    "make_qwen3_next",
    "make_qwen3_vl",
    "make_sliding",
    "make_vision",
    "write_tokenizer",
]
