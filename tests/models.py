"""Tiny models with random weights for the real engine, the same on every machine.

Each maker writes a folder as one downloads it: config, weights in bf16, tokenizer, chat template; under 6 MB. The rows
of special tokens in the output layer are zero, so that a greedy answer never ends by chance.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
BOS_ID, PAD_ID, EOS_ID = 0, 2, 4
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # after these, where a model has a tower
VOCABULARY = 1024
# The eight frequencies of a head, shared out among time, height and width.
MULTIMODAL_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

MakeModel = Callable[[Path], Path]


def make_llama(directory: Path) -> Path:
    """Dense. Its sizes are no multiples of 128, as those of SmolLM2 are not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, LlamaForCausalLM, config, add_bos=True)


def make_apertus(directory: Path) -> Path:
    """Apertus: dense, with the activation xIELU in an MLP without gates."""
    from transformers import ApertusConfig, ApertusForCausalLM

    config = ApertusConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, ApertusForCausalLM, config, varied=True)


def make_hybrid(directory: Path) -> Path:
    """Qwen3.5: three Gated DeltaNet layers, then one of attention."""
    return _qwen3_5(directory, hidden_size=128, intermediate_size=256, num_hidden_layers=4)


def make_deep_hybrid(directory: Path) -> Path:
    """The same with 16 layers, and somewhat wider; 9 MB. For benchmarks."""
    return _qwen3_5(directory, hidden_size=160, intermediate_size=320, num_hidden_layers=16)


def _qwen3_5(directory: Path, **sizes: Any) -> Path:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    return _write(directory, Qwen3_5ForCausalLM, _qwen3_5_text(**sizes))


def _qwen3_5_text(**sizes: Any) -> Any:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=32768,
        **sizes,
        **_common(),
    )


def make_vision(directory: Path) -> Path:
    """The hybrid with a vision tower. An image of 64 x 64 pixels takes four tokens, and two around them."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    start, image, end = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(VISION_TOKENS))
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    }
    common = _common()
    config = Qwen3_5Config(
        text_config=_qwen3_5_text(
            hidden_size=128, intermediate_size=256, num_hidden_layers=4, rope_parameters=MULTIMODAL_ROPE
        ).to_dict(),
        vision_config=tower,
        vision_start_token_id=start,
        image_token_id=image,
        video_token_id=image,
        vision_end_token_id=end,
        **{name: common[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")},
    )
    _write(directory, Qwen3_5ForConditionalGeneration, config, special_tokens=SPECIAL_TOKENS + VISION_TOKENS)
    # As published checkpoints have them; transformers 5 writes neither.
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    written["vision_config"]["deepstack_visual_indexes"] = []
    (directory / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},  # pixels, despite the names
        "patch_size": tower["patch_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2), encoding="utf-8")
    return directory


def make_gemma3(directory: Path) -> Path:
    """Gemma 3 with its SigLIP tower. An image takes 16 tokens, and two around them, whatever its size."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokens = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    common = _common()
    config = Gemma3Config(
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
            "max_position_embeddings": 8192,
            **common,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 128,
            "patch_size": 16,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        **_image_tokens(boi_token_index=0, image_token_index=1, eoi_token_index=2),
        **_without_vocabulary(common),
    )
    _write(directory, Gemma3ForConditionalGeneration, config, special_tokens=SPECIAL_TOKENS + tokens, varied=True)
    _write_preprocessor(
        directory,
        image_processor_type="Gemma3ImageProcessor",
        size={"height": 128, "width": 128},
        resample=2,
        rescale_factor=1 / 255,
    )
    return directory


def make_lfm2_vl(directory: Path) -> Path:
    """LFM2-VL: a SigLIP 2 tower that takes any shape, and cuts large images into tiles of 128 x 128 pixels."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    tokens = ("<|image_start|>", "<image>", "<|image_end|>", "<|img_thumbnail|>")
    places = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
    common = _common()
    config = Lfm2VlConfig(
        text_config={
            "model_type": "lfm2",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "full_attn_idxs": [2],
            "block_auto_adjust_ff_dim": False,
            "max_position_embeddings": 8192,
            **common,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 16,
            "num_patches": 16,
            "vision_use_head": False,
        },
        downsample_factor=2,
        projector_hidden_size=96,
        **_image_tokens(image_token_id=1),
        **_without_vocabulary(common),
    )
    _write(
        directory,
        Lfm2VlForConditionalGeneration,
        config,
        special_tokens=SPECIAL_TOKENS + tokens + places,
        varied=True,
    )
    _write_preprocessor(
        directory,
        rescale_factor=1 / 255,
        encoder_patch_size=16,
        downsample_factor=2,
        min_image_tokens=1,
        max_image_tokens=16,
        min_tiles=2,
        max_tiles=4,
        tile_size=128,
    )
    return directory


def make_mistral3(directory: Path) -> Path:
    """Mistral Small 3 with its Pixtral tower. An image of 64 x 64 pixels takes two rows of two tokens."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokens = ("[IMG_BREAK]", "[IMG]", "[IMG_END]")
    common = _common()
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            **common,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 256,
            "patch_size": 16,
            "hidden_act": "silu",
        },
        spatial_merge_size=2,
        **_image_tokens(image_token_index=1),
        **_without_vocabulary(common),
    )
    _write(directory, Mistral3ForConditionalGeneration, config, special_tokens=SPECIAL_TOKENS + tokens, varied=True)
    _write_preprocessor(
        directory,
        image_processor_type="PixtralImageProcessor",
        size={"longest_edge": 256},
        resample=3,
        rescale_factor=1 / 255,
        patch_size=16,
    )
    return directory


def make_glm4v(directory: Path) -> Path:
    """GLM-4.1V. An image of 64 x 64 pixels takes four tokens, and two around them."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    tokens = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
    common = _common()
    config = Glm4vConfig(
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            },
            **common,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_heads": 4,
            "image_size": 64,
            "patch_size": 16,
            "out_hidden_size": 128,
        },
        **_image_tokens(image_start_token_id=0, image_token_id=1, image_end_token_id=2),
        **_without_vocabulary(common),
    )
    _write(directory, Glm4vForConditionalGeneration, config, special_tokens=SPECIAL_TOKENS + tokens, varied=True)
    _write_preprocessor(
        directory,
        image_processor_type="Glm4vImageProcessor",
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},  # pixels, despite the names
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
    )
    return directory


def make_qwen3_vl(directory: Path) -> Path:
    """Qwen3-VL, whose tower also adds to the first layers of the language model what it has of the first of its own."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    common = _common()
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [8, 4, 4],
            },
            **common,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 16,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_image_tokens(vision_start_token_id=0, image_token_id=1, vision_end_token_id=2, video_token_id=1),
        **_without_vocabulary(common),
    )
    _write(
        directory,
        Qwen3VLForConditionalGeneration,
        config,
        special_tokens=SPECIAL_TOKENS + VISION_TOKENS,
        varied=True,
    )
    _write_preprocessor(
        directory,
        image_processor_type="Qwen2VLImageProcessorFast",
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},  # pixels, despite the names
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
    )
    return directory


def make_mtp(directory: Path) -> Path:
    """The hybrid with a tower and a prediction head, which is the layer of attention again, with random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    make_vision(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    announce_prediction_head(config)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = load_file(directory / "model.safetensors")
    layer = "model.language_model.layers.3."
    head = {
        name.replace(layer, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(layer)
    }
    norm = weights["model.language_model.norm.weight"]
    size = norm.numel()
    head |= {f"mtp.{name}.weight": norm.clone() for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")}
    numbers = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0)) * 0.08
    head["mtp.fc.weight"] = numbers.to(torch.bfloat16)
    save_file(weights | head, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def announce_prediction_head(config: dict[str, Any]) -> None:
    config["text_config"]["mtp_num_hidden_layers"] = 1


def make_sliding(directory: Path) -> Path:
    """AFMoE, with dense layers: three with a window of 512 tokens, then a global one, twice."""
    from transformers import AfmoeConfig, AfmoeForCausalLM

    config = AfmoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_dense_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        sliding_window=512,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, AfmoeForCausalLM, config)


def make_conv(directory: Path) -> Path:
    """LFM2: short convolutions, and attention in layers 2 and 5."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=[2, 5],
        block_auto_adjust_ff_dim=False,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, Lfm2ForCausalLM, config)


def make_moe(directory: Path) -> Path:
    """Qwen3-MoE: two of eight experts a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, Qwen3MoeForCausalLM, config)


def make_nemotron_h(directory: Path) -> Path:
    """Nemotron-H: Mamba2, attention, dense layers and experts beside a shared one."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        hidden_size=128,
        intermediate_size=256,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "moe", "full_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
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
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, NemotronHForCausalLM, config, varied=True)


def make_kimi_linear(directory: Path) -> Path:
    """Kimi Linear: three KDA layers, then one of latent attention; experts beside a shared one from layer 1."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_num_heads=4,
        linear_head_dim=32,
        **_latent_attention(),
        **_shared_experts(),
        **_common(),
    )
    return _write(directory, KimiLinearForCausalLM, config, varied=True)


def make_deepseek(directory: Path) -> Path:
    """DeepSeek-V3 as Kimi-K2 and Moonlight have it: latent attention, one group of experts and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        hidden_size=128,
        num_hidden_layers=3,
        q_lora_rank=96,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        **_latent_attention(),
        **_shared_experts(),
        **_common(),
    )
    return _write(directory, DeepseekV3ForCausalLM, config, varied=True)


def make_bailing_hybrid(directory: Path) -> Path:
    """Ling 3: KDA with a bounded decay, latent attention with a gate, and groups of experts."""
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    config = BailingHybridConfig(
        hidden_size=128,
        num_hidden_layers=4,
        layer_group_size=4,
        head_dim=32,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        **_latent_attention(),
        **(_shared_experts() | {"n_group": 4, "topk_group": 2}),
        **_common(),
    )
    return _write(directory, BailingHybridForCausalLM, config, varied=True)


def make_glm_moe_dsa(directory: Path) -> Path:
    """GLM-5: latent attention to the 128 tokens that an indexer chooses; a dense layer, then experts."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        q_lora_rank=96,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=128,
        first_k_dense_replace=1,
        **_latent_attention(),
        **_shared_experts(),
        **_common(),
    )
    return _write(directory, GlmMoeDsaForCausalLM, config, varied=True)


def make_glm4_moe(directory: Path) -> Path:
    """GLM-4.5: attention with grouped queries, a dense layer, then experts beside a shared one."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_qk_norm=True,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        max_position_embeddings=16384,
        **_shared_experts(),
        **_common(),
    )
    return _write(directory, Glm4MoeForCausalLM, config, varied=True)


def make_qwen3_next(directory: Path) -> Path:
    """Qwen3-Next: three Gated DeltaNet layers, then one of attention; the shared expert has a gate."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, Qwen3NextForCausalLM, config, varied=True)


def make_lfm2_moe(directory: Path) -> Path:
    """LFM2 with experts: short convolutions, and attention in layer 2."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    config = Lfm2MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_dense_layers=1,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=16384,
        **_common(),
    )
    return _write(directory, Lfm2MoeForCausalLM, config, varied=True)


def make_gpt_oss(directory: Path) -> Path:
    """gpt-oss: windows and sinks in attention, a router and experts with biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=512,
        max_position_embeddings=131072,  # as many times the original ones as YaRN's factor
        **_common(),
    )
    return _write(directory, GptOssForCausalLM, config, varied=True)


def _latent_attention() -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "max_position_embeddings": 16384,
    }


def _shared_experts() -> dict[str, Any]:
    return {
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    }


def _image_tokens(**offsets: int) -> dict[str, Any]:
    """Ids of special tokens that follow those of every model."""
    return {name: len(SPECIAL_TOKENS) + offset for name, offset in offsets.items()}


def _without_vocabulary(common: dict[str, Any]) -> dict[str, Any]:
    """What a model with a tower says beside its language model."""
    return {name: value for name, value in common.items() if name != "vocab_size"}


def _write_preprocessor(directory: Path, **settings: Any) -> None:
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.4, 0.6]}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.08,  # large enough for logits that differ
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _write(
    directory: Path,
    model_class: Any,
    config: Any,
    *,
    add_bos: bool = False,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    varied: bool = False,
) -> Path:
    """Make a model and save it.

    Args:
        varied: norms, biases and the like are not left at zero or one, with which an engine could do without them.
    """
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:  # not every architecture uses initializer_range
                parameter.normal_(std=config.initializer_range)
        for name, parameter in model.named_parameters():
            if ".visual." in name and name.endswith(".bias"):  # zero, else
                parameter.normal_(std=config.initializer_range)
        for tensor in (*model.parameters(), *model.buffers()) if varied else ():
            if tensor.dim() == 1 and (tensor == tensor[0]).all():
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        model.get_output_embeddings().weight[: len(special_tokens)] = 0.0
    model.to(torch.bfloat16).save_pretrained(directory)
    _rename_as_published(directory, config.model_type)
    write_tokenizer(directory, add_bos=add_bos, special_tokens=special_tokens)
    return directory


def _rename_as_published(directory: Path, model_type: str) -> None:
    """Give settings and weights the names that published checkpoints have, where transformers 5 writes others."""
    match model_type:
        case "qwen3_5_text":  # those of a model with a vision tower
            _rename_weights(directory, r"^model\.", "model.language_model.")
        case "gemma3" | "lfm2_vl":
            _rename_weights(directory, r"(^|\.)vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.")
        case "qwen3_vl":
            _update_config(
                directory, lambda config: {"vision_config": config["vision_config"] | {"model_type": "qwen3_vl"}}
            )
        case "qwen3_moe":
            _update_config(directory, lambda config: {"num_experts": config["num_local_experts"]})
        case "nemotron_h":
            _update_config(directory, _nemotron_h_config)
        case "kimi_linear":
            _rename_weights(directory, r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.")
            _update_config(directory, _kimi_linear_config)
        case "bailing_hybrid":
            # The layers with KDA only; they are all but the last here.
            _rename_weights(directory, r"\.([0-2])\.attention\.dense\.", r".\1.attention.o_proj.")
            _update_config(directory, _bailing_hybrid_config)
        case "gpt_oss":
            _add_separate_experts(directory)


def _nemotron_h_config(config: dict[str, Any]) -> dict[str, Any]:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    kinds, mtp_kinds = (
        [names.get(kind, kind) for kind in config[key]] for key in ("layers_block_type", "mtp_layers_block_type")
    )
    return {
        "layers_block_type": kinds,
        "mtp_layers_block_type": mtp_kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),  # all that exllamav3 1.6.4 reads
    }


def _kimi_linear_config(config: dict[str, Any]) -> dict[str, Any]:
    def layers(kind: str) -> list[int]:
        return [number for number, layer_type in enumerate(config["layer_types"], 1) if layer_type == kind]

    linear_attention = {
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "kda_layers": layers("linear_attention"),
        "full_attn_layers": layers("full_attention"),
    }
    return {
        "linear_attn_config": linear_attention,
        "first_k_dense_replace": config["mlp_layer_types"].index("sparse"),
    }


def _bailing_hybrid_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": config["linear_head_dim"],
        "n_group": config["num_expert_group"],
        "num_experts_per_tok": config["num_experts_per_token"],
    }


def _rename_weights(directory: Path, pattern: str, replacement: str) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights: dict[str, Tensor] = {
        re.sub(pattern, replacement, name): weight for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def _add_separate_experts(directory: Path) -> None:
    """Beside the weights of all experts in one, which the engine reads in MXFP4 only, those of each, as in EXL3."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    fused: dict[str, Tensor] = load_file(path)
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
    save_file(fused | separate, path, metadata={"format": "pt"})


def _update_config(directory: Path, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes(config), indent=2), encoding="utf-8")


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def write_tokenizer(directory: Path, *, add_bos: bool = False, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """A byte-level BPE of 1,024 tokens, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def corpus() -> Iterator[str]:
    """Prose, code and JSON from a few words, the same everywhere."""
    people = ("Ada", "Basil", "Carmen", "Dmitri", "Esther", "Farid", "Greta", "Hiroshi", "Ines", "Jonas")
    verbs = ("measured", "carried", "painted", "answered", "gathered", "followed", "repaired", "described", "counted")
    things = ("river", "lantern", "engine", "garden", "letter", "mountain", "window", "harvest", "compass", "orchard")
    places = ("harbour", "station", "library", "valley", "workshop", "market", "bridge", "island", "kitchen", "forest")
    manners = ("slowly", "carefully", "together", "without", "warning", "before", "morning")
    for index, (person, verb, thing) in enumerate(itertools.product(people, verbs, things)):
        place, manner = places[index * 7 % len(places)], manners[index * 5 % len(manners)]
        other = things[index * 3 % len(things)]
        yield f"{person} {verb} the {thing} near the {place}, {manner}, because the {other} had not been {verb} yet.\n"
        yield f"def {verb}_{thing}({other}, index={index}):\n    return [{other} for {place} in range({index})]\n"
        yield f'{{"name": "{person}", "{thing}": {index}, "place": "{place}", "{other}": [true, false, null]}}\n'
