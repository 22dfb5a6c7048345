"""Tiny LoRA adapters for the tiny models, as PEFT saves them, the same on every machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RANK, ALPHA = 4, 8
ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: Path,
    targets: Sequence[str] = ATTENTION_AND_MLP,
    *,
    size: float = 0.1,
    rank: int = RANK,
    **config: Any,
) -> Path:
    """An adapter of a model, for the linear layers whose names end with `targets`.

    Args:
        size: of its numbers.
        config: entries of adapter_config.json.
    """
    weights = {}
    for name, (outputs, inputs) in layers(model).items():
        if name.endswith(tuple(targets)):
            key = "base_model.model." + name.replace("model.language_model.", "model.", 1)
            weights[f"{key}.lora_A.weight"] = _numbers(f"{key} A", rank, inputs) * size
            weights[f"{key}.lora_B.weight"] = _numbers(f"{key} B", outputs, rank) * size
    return write_adapter(directory, weights, r=rank, **config)


def write_adapter(directory: Path, weights: Mapping[str, Tensor], **config: Any) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    save_file(dict(weights), directory / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False, **config}
    (directory / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def layers(model: Path) -> dict[str, Sequence[int]]:
    """Shapes of the matrices of a model, (outputs, inputs), by the names of the layers."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}


def merge(directory: Path, model: Path, adapter: Path, scaling: float = 1.0) -> Path:
    """The model with the adapter's products added to its weights, written to a folder of its own."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    weights, parts = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    for key in [key for key in parts if key.endswith("lora_A.weight")]:
        layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        name = f"{layer}.weight" if f"{layer}.weight" in weights else f"model.language_model.{layer[6:]}.weight"
        product = parts[key.replace("lora_A", "lora_B")] @ parts[key]
        merged = weights[name].float() + product * (scaling * config["lora_alpha"] / config["r"])
        weights[name] = merged.half()  # which the engine computes with
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _numbers(name: str, *shape: int) -> Tensor:
    """Normally distributed, the same for a name."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
