"""What a model will take is known before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.exllamav3.engine import DEVICE
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from tests.containers import SMALL
from tests.scripted import load_settings

# Layers, keys and values, heads, their size, bytes (the CPU kernels keep the cache in fp32), tokens.
CACHE = 4 * 2 * 2 * 32 * (4 if DEVICE == "cpu" else 2) * 8192


def estimated(directory: Path, drafter: Path | None = None, **model: object) -> int:
    settings = load_settings(**(SMALL | model))
    if drafter is not None:
        draft = DraftModelConfig(draft_model_dir=str(drafter.parent), draft_model_name=drafter.name)
        settings = settings.model_copy(update={"draft_model": draft})
    return ExllamaV3Container.create(directory, settings).memory_bytes()


def weights(directory: Path) -> int:
    return (directory / "model.safetensors").stat().st_size * (3 if DEVICE == "cpu" else 1)


def test_weights_and_cache(tiny_llama: Path) -> None:
    assert estimated(tiny_llama) == weights(tiny_llama) + CACHE
    assert estimated(tiny_llama, cache_size=16384) == weights(tiny_llama) + 2 * CACHE
    assert estimated(tiny_llama, drafter=tiny_llama) == 2 * (weights(tiny_llama) + CACHE)
    assert ExllamaV3Container.create(tiny_llama, load_settings()).memory_bytes() == weights(tiny_llama) + 2 * CACHE


@pytest.mark.parametrize("name", ["tiny_hybrid", "tiny_sliding", "tiny_conv"])
def test_states_of_recurrent_layers(name: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(name)
    one, four = (estimated(directory, max_batch_size=size) for size in (1, 4))
    assert weights(directory) < one < four
