from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.exllamav3.cpu import tied
from backends.exllamav3.cpu.tied import TiedMatrix
from backends.exllamav3.engine import Config, Model
from tests.logits import engine_logits, prompt, reference_logits

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_products(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied, "STEP", 128)  # several steps
    embedding, x = torch.randn(30, 24).half(), torch.randn(1, rows, 24)
    matrix = TiedMatrix(embedding)
    torch.testing.assert_close(matrix.product(x), x @ embedding.T.float(), atol=2e-2, rtol=1e-3)
    assert torch.equal(matrix.weight(), embedding.T)


def test_what_is_likely_is_not_rounded() -> None:
    embedding, x = torch.randn(1000, 64).half(), torch.randn(1, 64)
    logits, expected = TiedMatrix(embedding).product(x), x @ embedding.T.float()
    largest = expected.topk(50).indices
    torch.testing.assert_close(logits.gather(1, largest), expected.gather(1, largest))
    assert (logits - expected).abs().max() > 1e-4, "all of it is exact"


def parts(directory: Path) -> tuple[Any, Any]:
    """The embedding and the output layer."""
    model = Model.from_config(Config.from_directory(str(directory)))
    model.load(progressbar=False)
    return model.modules[0], model.modules[-1]


def test_an_output_layer_without_weights_of_its_own_takes_the_embeddings(tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    weights = load_file(tmp_path / "model.safetensors")
    del weights[OUTPUT]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    embedding, output = parts(tmp_path)
    held = embedding.embedding.weight
    assert torch.equal(held, weights[EMBEDDING].half())
    assert output.inner.weight.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    ids = prompt(20)
    logits, expected = engine_logits(tmp_path, ids), reference_logits(tmp_path, ids)
    assert torch.cosine_similarity(logits, expected, dim=-1).min() >= 0.9999


def test_an_output_layer_with_weights_of_its_own_keeps_them(tiny_llama: Path) -> None:
    embedding, output = parts(tiny_llama)
    assert embedding.embedding.weight.dtype == torch.bfloat16
    assert not isinstance(output.inner.matrix, TiedMatrix)
