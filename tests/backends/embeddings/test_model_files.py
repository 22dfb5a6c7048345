"""Of what kind a folder's model is, by its small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.embeddings.messages import Kind
from backends.embeddings.model_files import find_architecture, find_kind
from common.errors import InvalidRequest, Unsupported

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
THEIR_OWN = {"idx": 1, "name": "1", "path": "", "type": "modeling_of_theirs.Pooling"}
MODULES, OWN, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"


def folder(path: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def config(architecture: str) -> dict[str, list[str]]:
    return {"architectures": [architecture]}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({CONFIG: config("BertModel"), MODULES: [TRANSFORMER]}, "embedding"),
        ({CONFIG: config("BertModel")}, "embedding"),
        ({MODULES: [TRANSFORMER]}, "embedding"),
        ({CONFIG: config("Qwen3ForCausalLM"), MODULES: [TRANSFORMER]}, "embedding"),
        ({CONFIG: config("BertForSequenceClassification")}, "reranker"),
        ({CONFIG: config("Qwen3ForCausalLM"), OWN: {"model_type": "CrossEncoder"}}, "reranker"),
        ({CONFIG: config("XLMRobertaForSequenceClassification"), OWN: {"model_type": "CrossEncoder"}}, "reranker"),
        ({CONFIG: {"architectures": []}}, "embedding"),
        ({CONFIG: {"architectures": [5]}}, "embedding"),
    ],
)
def test_the_kind_is_found(tmp_path: Path, files: dict[str, object], kind: Kind) -> None:
    assert find_kind(folder(tmp_path, files)) == kind


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        ({CONFIG: config("LlamaForCausalLM")}, Unsupported, r"is a language model \(LlamaForCausalLM\)"),
        (
            {CONFIG: config("BertModel"), OWN: {"model_type": "SparseEncoder"}},
            Unsupported,
            "is a SparseEncoder",
        ),
        (
            {CONFIG: config("X"), MODULES: [TRANSFORMER, THEIR_OWN]},
            Unsupported,
            "'modeling_of_theirs.Pool.*never run",
        ),
        ({CONFIG: config("X"), MODULES: [{"type": None}]}, Unsupported, "never run"),
        ({CONFIG: config("X"), MODULES: [7]}, Unsupported, "never run"),
        ({CONFIG: config("X"), MODULES: "{"}, InvalidRequest, "modules.json of .* is damaged"),
        ({CONFIG: config("X"), MODULES: {}}, InvalidRequest, "modules.json of .* is damaged"),
        ({CONFIG: config("X"), OWN: "nothing"}, InvalidRequest, "config_sentence_transformers.json .* is not JSON"),
        ({CONFIG: "[1, 2"}, InvalidRequest, "config.json .* is not JSON"),
    ],
)
def test_what_is_not_served_says_why(
    tmp_path: Path, files: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        find_kind(folder(tmp_path, files))


def test_the_architecture_is_that_of_the_configuration(tmp_path: Path) -> None:
    assert find_architecture(tmp_path) == ""
    assert find_architecture(folder(tmp_path, {CONFIG: config("BertModel")})) == "BertModel"
