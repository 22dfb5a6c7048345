"""From settings to a model's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCABULARY, write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MakeModel = Callable[[Path], Path]

# Of language models, and of those that hold one beside a tower.
COMMON: dict[str, Any] = {
    "initializer_range": 0.08,  # large enough for logits that differ
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def language_model(**settings: Any) -> dict[str, Any]:
    """What most models have, with changes."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
    }
    return COMMON | sizes | settings


def write(
    directory: Path,
    architecture: str,
    settings: dict[str, Any],
    *,
    add_bos: bool = False,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    varied: bool = False,
) -> Path:
    """Make a model and save it.

    Args:
        architecture: the name of its class in transformers.
        settings: of its configuration.
        varied: norms, biases and the like are not left at zero or one, with which an engine could do without them.
    """
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**settings)
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
    write_tokenizer(directory, add_bos=add_bos, special_tokens=special_tokens)
    return directory


# --- what published checkpoints have otherwise than transformers 5 writes it ------------------------------------------


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory


def rename_weights(directory: Path, pattern: str, replacement: str) -> Path:
    return edit_weights(
        directory,
        lambda weights: {re.sub(pattern, replacement, name): weight for name, weight in weights.items()},
    )


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Put what a function makes of all weights in their place."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return directory
