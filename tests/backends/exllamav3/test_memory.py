"""What a model will take is known before it is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from backends.exllamav3.engine import DEVICE
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import ModelLoadFailed
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
    return (directory / "model.safetensors").stat().st_size


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


def test_weights_in_fp32_take_half(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_llama, tmp_path / "wide")
    path = tmp_path / "wide" / "model.safetensors"
    save_file({name: weight.float() for name, weight in load_file(path).items()}, path, {"format": "pt"})
    assert abs(estimated(tmp_path / "wide") - estimated(tiny_llama)) < 10_000  # names of types


@pytest.mark.skipif(DEVICE == "cuda", reason="weights go to the GPU")
def test_what_host_memory_has_no_room_for_is_not_loaded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3_HOST_MEM_RESERVE_MB", str(10**9))  # that the engine keeps free
    container = ExllamaV3Container.create(tiny_llama, load_settings(**SMALL))
    with pytest.raises(ModelLoadFailed, match=f"^{tiny_llama.name} needs .* a smaller cache_size"):
        next(iter(container.load()))
