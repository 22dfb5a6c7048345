"""A vision tower beside a language model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models.recurrent import qwen3_5
from tests.models.tokenizer import SPECIAL_TOKENS
from tests.models.writing import COMMON, edit_config, edit_weights, language_model, rename_weights, write

if TYPE_CHECKING:
    from torch import Tensor

# Before, within and after an image, where the engine or transformers looks for them.
QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_ID = len(SPECIAL_TOKENS) + 1  # stands for what a tower makes of an image
PATCH, TILE = 16, 128  # pixels
# Of an image's colours. They differ, so that a change of order is seen.
IMAGE_MEAN, IMAGE_STD = (0.5, 0.4, 0.3), (0.5, 0.4, 0.6)
# The eight frequencies of a head, shared out among time, height and width.
MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
# A tower whose patches become tokens in blocks of four.
QWEN_TOWER = {"depth": 2, "num_heads": 4, "out_hidden_size": 128}
QWEN_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},  # pixels, despite the names
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
GEMMA4_WINDOW = 16  # tokens
SIGLIP_TOWER = {"num_hidden_layers": 2, "num_attention_heads": 4, "vision_use_head": False}


def make_vision(directory: Path) -> Path:
    """Qwen3.5, the hybrid with a tower. An image of 64 x 64 pixels takes four tokens, and two around them."""
    _write(
        directory,
        "Qwen3_5ForConditionalGeneration",
        qwen3_5(rope_parameters=MULTIMODAL_ROPE | {"partial_rotary_factor": 0.25, "mrope_interleaved": True}),
        QWEN_TOWER | {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64},
        QWEN_PREPROCESSOR,
        QWEN_TOKENS,
        varied=False,
        **_ids(vision_start_token_id=0, image_token_id=1, video_token_id=1, vision_end_token_id=2),
    )
    # As published checkpoints have it; transformers 5 leaves it out.
    return edit_config(directory, lambda config: config["vision_config"].update(deepstack_visual_indexes=[]))


def make_mtp(directory: Path) -> Path:
    """The same with a prediction head, which is the layer of attention again, with random weights."""
    make_vision(directory)
    edit_config(directory, announce_prediction_head)
    return edit_weights(directory, _with_prediction_head)


def announce_prediction_head(config: dict[str, Any]) -> None:
    config["text_config"]["mtp_num_hidden_layers"] = 1


def _with_prediction_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

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
    return weights | head


def make_qwen3_vl(directory: Path) -> Path:
    """Qwen3-VL, whose tower also adds to the first layers of the language model what it has of the first of its own."""
    rope = {"mrope_interleaved": True, "mrope_section": [8, 4, 4]}
    _write(
        directory,
        "Qwen3VLForConditionalGeneration",
        _text(num_hidden_layers=3, head_dim=32, rope_parameters=MULTIMODAL_ROPE | rope),
        QWEN_TOWER | {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        QWEN_PREPROCESSOR,
        QWEN_TOKENS,
        **_ids(vision_start_token_id=0, image_token_id=1, video_token_id=1, vision_end_token_id=2),
    )
    return edit_config(directory, lambda config: config["vision_config"].update(model_type="qwen3_vl"))


def make_qwen2_5_vl(directory: Path) -> Path:
    """Qwen2.5-VL, whose tower sees windows of 64 x 64 pixels alone, except in its second layer."""
    _write(
        directory,
        "Qwen2_5_VLForConditionalGeneration",
        _text(rope_parameters=MULTIMODAL_ROPE | {"mrope_section": [4, 6, 6]}),
        QWEN_TOWER | {"depth": 3, "intermediate_size": 160, "window_size": 64, "fullatt_block_indexes": [1]},
        QWEN_PREPROCESSOR,
        QWEN_TOKENS,
        **_ids(vision_start_token_id=0, image_token_id=1, video_token_id=1, vision_end_token_id=2),
    )
    return edit_config(directory, _without_text_config)


def _without_text_config(config: dict[str, Any]) -> None:
    """The language model's settings stand beside those of the tower."""
    config.update(config.pop("text_config") | {"model_type": config["model_type"]})
    del config["vision_config"]["model_type"]
    config["vision_config"]["spatial_patch_size"] = PATCH


def make_glm4v(directory: Path) -> Path:
    """GLM-4.1V. An image of 64 x 64 pixels takes four tokens, and two around them."""
    return _write(
        directory,
        "Glm4vForConditionalGeneration",
        _text(rope_parameters=MULTIMODAL_ROPE | {"partial_rotary_factor": 0.5}),
        QWEN_TOWER | {"intermediate_size": 160, "image_size": 64},
        QWEN_PREPROCESSOR | {"image_processor_type": "Glm4vImageProcessor"},
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
        **_ids(image_start_token_id=0, image_token_id=1, image_end_token_id=2),
    )


def make_gemma3(directory: Path) -> Path:
    """Gemma 3 with its SigLIP tower. An image takes 16 tokens, and two around them, whatever its size."""
    _write(
        directory,
        "Gemma3ForConditionalGeneration",
        _text(head_dim=32, query_pre_attn_scalar=32, sliding_window=512),
        SIGLIP_TOWER | {"image_size": 128},
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 128, "width": 128},
            "resample": 2,
            "rescale_factor": 1 / 255,
        },
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        mm_tokens_per_image=16,
        **_ids(boi_token_index=0, image_token_index=1, eoi_token_index=2),
    )
    return _rename_tower(directory)


def make_gemma4(directory: Path) -> Path:
    """Gemma 4: layers with windows and without in turns. An image of 240 x 144 pixels takes five by three tokens."""
    full_attention = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    _write(
        directory,
        "Gemma4ForConditionalGeneration",
        _text(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=GEMMA4_WINDOW,
            use_bidirectional_attention="vision",
            head_dim=32,
            attention_k_eq_v=True,
            final_logit_softcapping=30.0,
            hidden_size_per_layer_input=0,
            **full_attention,
        ),
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "position_embedding_size": 64,
            "pooling_kernel_size": 3,
            "standardize": True,
        },
        {
            "do_convert_rgb": True,
            "do_rescale": True,
            "do_normalize": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "patch_size": PATCH,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 15,
        },
        ("<|image>", "<|image|>", "<image|>"),
        vision_soft_tokens_per_image=15,
        **_ids(boi_token_id=0, image_token_id=1, eoi_token_id=2),
    )
    settings = directory / "preprocessor_config.json"
    processor = {"image_processor": json.loads(settings.read_text(encoding="utf-8"))}
    settings.rename(directory / "processor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
    edit_config(directory, lambda config: config["text_config"].update(full_attention))
    edit_config(directory, lambda config: config["text_config"].pop("per_layer_config"))
    return edit_weights(directory, _as_if_trained)


def _as_if_trained(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Places of patches that differ; and queries as short as they are where attention does not scale them."""
    import torch

    table = "model.vision_tower.patch_embedder.position_embedding_table"
    places = torch.randn(weights[table].shape, generator=torch.Generator().manual_seed(0)) * 0.5
    norms = {name: norm * len(norm) ** -0.5 for name, norm in weights.items() if name.endswith(".q_norm.weight")}
    return weights | norms | {table: places.to(torch.bfloat16)}


def make_lfm2_vl(directory: Path) -> Path:
    """LFM2-VL: a SigLIP 2 tower that takes any shape, and cuts large images into tiles of 128 x 128 pixels."""
    tokens = ("<|image_start|>", "<image>", "<|image_end|>", "<|img_thumbnail|>")
    places = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
    _write(
        directory,
        "Lfm2VlForConditionalGeneration",
        _text(model_type="lfm2", num_hidden_layers=3, full_attn_idxs=[2], block_auto_adjust_ff_dim=False),
        SIGLIP_TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
        {
            "rescale_factor": 1 / 255,
            "encoder_patch_size": PATCH,
            "downsample_factor": 2,
            "min_image_tokens": 1,
            "max_image_tokens": 16,
            "min_tiles": 2,
            "max_tiles": 4,
            "tile_size": TILE,
        },
        tokens + places,
        downsample_factor=2,
        projector_hidden_size=96,
        **_ids(image_token_id=1),
    )
    return _rename_tower(directory)


def make_mistral3(directory: Path) -> Path:
    """Mistral Small 3 with its Pixtral tower. An image of 64 x 64 pixels takes two rows of two tokens."""
    return _write(
        directory,
        "Mistral3ForConditionalGeneration",
        _text(model_type="mistral", head_dim=32, sliding_window=None, rms_norm_eps=1e-5),
        {
            "model_type": "pixtral",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 256,
            "hidden_act": "silu",
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 256},
            "resample": 3,
            "rescale_factor": 1 / 255,
            "patch_size": PATCH,
        },
        ("[IMG_BREAK]", "[IMG]", "[IMG_END]"),
        spatial_merge_size=2,
        **_ids(image_token_index=1),
    )


def _text(**settings: Any) -> dict[str, Any]:
    return language_model(**({"num_hidden_layers": 2, "max_position_embeddings": 8192} | settings))


def _ids(**offsets: int) -> dict[str, Any]:
    """Of special tokens that follow those of every model."""
    return {name: len(SPECIAL_TOKENS) + offset for name, offset in offsets.items()}


def _rename_tower(directory: Path) -> Path:
    return rename_weights(directory, r"(^|\.)vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.")


def _write(
    directory: Path,
    architecture: str,
    text_config: dict[str, Any],
    vision_config: dict[str, Any],
    preprocessor: dict[str, Any],
    tokens: Sequence[str],
    *,
    varied: bool = True,
    **settings: Any,
) -> Path:
    """As `write()`, with a tower and what prepares images for it.

    Args:
        tokens: special ones, after those of every model.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "patch_size": PATCH}
    parts = {"text_config": text_config, "vision_config": sizes | vision_config}
    write(directory, architecture, COMMON | parts | settings, special_tokens=(*SPECIAL_TOKENS, *tokens), varied=varied)
    preprocessor = preprocessor | {"image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2), encoding="utf-8")
    return directory
