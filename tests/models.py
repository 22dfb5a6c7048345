"""Tiny models with random weights for the real engine, the same on every machine.

Each maker writes a folder as one downloads it: config, weights in bf16, tokenizer, chat template; under 6 MB. The rows
of special tokens in the output layer are zero, so that a greedy answer never ends by chance.
"""

from __future__ import annotations

import itertools
import json
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
) -> Path:
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
        model.get_output_embeddings().weight[: len(special_tokens)] = 0.0
    model.to(torch.bfloat16).save_pretrained(directory)
    match config.model_type:
        case "qwen3_5_text":
            _rename_weights(directory / "model.safetensors")
        case "qwen3_moe":
            _name_experts(directory / "config.json")
    write_tokenizer(directory, add_bos=add_bos, special_tokens=special_tokens)
    return directory


def _rename_weights(path: Path) -> None:
    """exllamav3 looks for this architecture's weights where a model with a vision tower has them."""
    from safetensors.torch import load_file, save_file

    def renamed(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    weights: dict[str, Tensor] = {renamed(name): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def _name_experts(path: Path) -> None:
    """transformers 5 writes this setting under another name than published checkpoints have it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["num_experts"] = config["num_local_experts"]
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


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
