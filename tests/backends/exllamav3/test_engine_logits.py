"""Logits of whole models, ours against transformers in fp32.

The engine computes in fp16 between layers, so a cosine of exactly 1 is not to be had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.engine import Config, Model
from tests.conftest import MakeOnce
from tests.exl3 import make_exl3
from tests.models import (
    VOCABULARY,
    MakeModel,
    make_apertus,
    make_bailing_hybrid,
    make_deepseek,
    make_glm4_moe,
    make_glm_moe_dsa,
    make_gpt_oss,
    make_hybrid,
    make_kimi_linear,
    make_lfm2_moe,
    make_moe,
    make_nemotron_h,
    make_qwen3_next,
)


def engine_logits(directory: Path, ids: Tensor) -> Tensor:
    model = Model.from_config(Config.from_directory(str(directory)))
    model.load(progressbar=False)
    with torch.inference_mode():
        logits: Tensor = model.forward(ids, {"attn_mode": "flash_attn_nc"})
    model.unload()
    return logits.float()[..., :VOCABULARY]


def reference_logits(directory: Path, ids: Tensor, **config: Any) -> Tensor:
    """Of transformers in fp32, with changes to the model's configuration."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(directory, **config)
    if settings.model_type == "qwen3_5_text":
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        weights = load_file(directory / "model.safetensors")
        # Named as exllamav3 expects them, see tests/models.py.
        model.load_state_dict({name.replace("language_model.", ""): weight for name, weight in weights.items()})
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, config=settings, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model.eval()(ids).logits
    return logits


def prompt(tokens: int) -> Tensor:
    return torch.randint(5, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("fixture", "cosine"),
    [
        ("tiny_llama", 0.9999),
        ("tiny_sliding", 0.9999),
        ("tiny_conv", 0.9995),
        ("tiny_hybrid", 0.999),
    ],
)
def test_logits_equal_those_of_transformers(request: pytest.FixtureRequest, fixture: str, cosine: float) -> None:
    directory: Path = request.getfixturevalue(fixture)
    ids = prompt(400)
    assert_close(engine_logits(directory, ids), reference_logits(directory, ids), cosine)


@pytest.mark.parametrize(
    "make",
    [
        make_moe,
        make_nemotron_h,
        make_kimi_linear,
        make_bailing_hybrid,
        *(
            pytest.param(make, marks=pytest.mark.slow)
            for make in (make_deepseek, make_glm4_moe, make_qwen3_next, make_lfm2_moe, make_gpt_oss)
        ),
    ],
    ids=lambda make: make.__name__.removeprefix("make_"),
)
def test_logits_of_models_that_choose_experts(make_once: MakeOnce, make: MakeModel) -> None:
    """In fp16 a near tie between experts may go either way, and what follows remembers it: hence the median."""
    directory, ids = make_once(make.__name__, make), prompt(400)
    logits, expected = engine_logits(directory, ids), reference_logits(directory, ids)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).median() >= 0.9999
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95


@pytest.mark.slow
def test_logits_of_apertus(make_once: MakeOnce) -> None:
    directory, ids = make_once("tiny-apertus", make_apertus), prompt(400)
    assert_close(engine_logits(directory, ids), reference_logits(directory, ids), 0.9999)


@pytest.mark.slow
def test_logits_beyond_what_sparse_attention_sees(make_once: MakeOnce) -> None:
    """Where random scores are as good as equal, some of the tokens chosen are others."""
    directory, ids = make_once("make_glm_moe_dsa", make_glm_moe_dsa), prompt(400)
    logits, expected = engine_logits(directory, ids), reference_logits(directory, ids)
    cosines = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)[0]
    assert cosines[:128].median() >= 0.9999
    assert cosines[128:].median() >= 0.998


def test_logits_beyond_the_window_of_sliding_attention(tiny_sliding: Path) -> None:
    """The engine's window has one key more than transformers' has at the same setting."""
    ids = prompt(1300)
    assert_close(engine_logits(tiny_sliding, ids), reference_logits(tiny_sliding, ids, sliding_window=513), 0.9999)


def test_logits_of_weights_in_exl3(tiny_exl3: Path) -> None:
    """Against the same weights unquantised, which tests/exl3.py decodes in its own way."""
    ids = prompt(100)
    assert_close(engine_logits(tiny_exl3, ids), reference_logits(tiny_exl3 / "decoded", ids), 0.9999)


@pytest.mark.parametrize(
    "make",
    [make_moe, *(pytest.param(make, marks=pytest.mark.slow) for make in (make_hybrid, make_qwen3_next))],
    ids=lambda make: make.__name__.removeprefix("make_"),
)
def test_logits_of_other_layers_in_exl3(make_once: MakeOnce, make: MakeModel) -> None:
    source = make_once(make.__name__, make)
    directory, ids = make_once(f"{make.__name__}-exl3", lambda folder: make_exl3(folder, source)), prompt(100)
    logits, expected = engine_logits(directory, ids), reference_logits(directory / "decoded", ids)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).median() >= 0.9999
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95


def assert_close(logits: Tensor, expected: Tensor, cosine: float) -> None:
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() >= cosine
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.98
    assert (logits - expected).abs().max() < 0.1 * expected.std()
