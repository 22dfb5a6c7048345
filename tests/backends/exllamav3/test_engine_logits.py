"""Logits of whole models, ours against transformers in fp32.

The engine computes in fp16 between layers, so a cosine of exactly 1 is not to be had.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import MakeOnce
from tests.exl3 import make_exl3
from tests.logits import engine_draft_logits, engine_logits, prompt, reference_draft_logits, reference_logits
from tests.models import (
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
    make_mtp,
    make_nemotron_h,
    make_qwen3_next,
)


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


def test_drafts_of_a_prediction_head(make_once: MakeOnce) -> None:
    directory, ids = make_once("make_mtp", make_mtp), prompt(100)
    assert_close(engine_draft_logits(directory, ids), reference_draft_logits(directory, ids), 0.9999)


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
