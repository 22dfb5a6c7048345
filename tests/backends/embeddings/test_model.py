"""Real models of sentence-transformers, against what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.embeddings.model_files import find_kind
from backends.embeddings.prompts import Purpose
from common.errors import ModelLoadFailed, Unsupported
from tests.minilm import MINILM

if TYPE_CHECKING:
    from backends.embeddings.computing import Rows

# The library takes ten seconds to import.
pytestmark = pytest.mark.slow

TEXTS = ["The cat sleeps.", "x", "Bread rises because yeast ferments the sugar in the dough. " * 3]
PAIRS = [("why does bread rise?", text) for text in TEXTS]


def minilm(folder: Path, change: Callable[[Path], None] = lambda folder: None) -> Path:
    """The packaged model, its files linked, before some of them are changed."""
    folder.mkdir()
    for path in MINILM.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(MINILM)
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(path)
    change(folder)
    return folder


def write(path: Path, content: object) -> None:
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def transformer(directory: Path, model_class: str) -> tuple[Any, Any]:
    import transformers

    model = getattr(transformers, model_class).from_pretrained(directory, dtype="float32").eval()
    return transformers.AutoTokenizer.from_pretrained(directory), model


def means(directory: Path, texts: Sequence[str]) -> Rows:
    """Vectors as the model's card says that they are made, one text at a time."""
    import torch

    tokenizer, model = transformer(directory, "AutoModel")
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer([text], return_tensors="pt")).last_hidden_state
        rows.append(torch.nn.functional.normalize(states[0].mean(dim=0), dim=0).numpy())
    return np.stack(rows)


def test_texts_and_ids_have_the_vectors_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from backends.embeddings.model import EmbeddingModel

    model = EmbeddingModel(MINILM, "cpu")
    info = model.info
    assert (info.kind, info.dimensions, info.max_seq_len, info.vocab_size) == ("embedding", 384, 256, 30522)
    expected = means(MINILM, TEXTS)
    np.testing.assert_allclose(model.embed(TEXTS, Purpose()), expected, atol=1e-5)
    ids = AutoTokenizer.from_pretrained(MINILM)(TEXTS)["input_ids"]
    np.testing.assert_allclose(model.embed_ids(ids), expected, atol=1e-5)
    assert model.count(TEXTS, Purpose()) == [len(each) for each in ids]
    assert model.count(["word " * 1000], Purpose()) == [1002]


def test_prompts_stand_before_the_texts(tmp_path: Path) -> None:
    from backends.embeddings.model import EmbeddingModel

    own = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    directory = minilm(tmp_path / "prompted", lambda folder: write(folder / "config_sentence_transformers.json", own))
    model = EmbeddingModel(directory, "cpu")
    assert (model.info.prompts, model.prompts) == (["query"], {"query": "query: "})
    purpose = Purpose("query: ", "query")
    np.testing.assert_allclose(
        model.embed(TEXTS, purpose), means(MINILM, [f"query: {text}" for text in TEXTS]), atol=1e-5
    )
    assert model.count(["x"], purpose) == [5]


def test_a_folder_without_a_tokenizer_is_incomplete(tmp_path: Path) -> None:
    from backends.embeddings.model import EmbeddingModel

    def take_tokenizer(folder: Path) -> None:
        for name in ("tokenizer.json", "vocab.txt"):
            (folder / name).unlink()

    with pytest.raises(ModelLoadFailed, match="knows . of the model's 30522 tokens: its files are missing"):
        EmbeddingModel(minilm(tmp_path / "without", take_tokenizer), "cpu")


@pytest.fixture
def make_reranker(tmp_path: Path) -> Callable[[int], Path]:
    def make(labels: int) -> Path:
        """With random weights in half precision, and the tokenizer of the packaged model."""
        import torch
        from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

        directory = tmp_path / f"reranker-{labels}"
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.5,
            "num_labels": labels,
        }
        model: Any = BertForSequenceClassification(BertConfig(**sizes))
        model.to(torch.bfloat16).save_pretrained(directory)
        AutoTokenizer.from_pretrained(MINILM, model_max_length=64).save_pretrained(directory)
        return directory

    return make


def test_a_reranker_says_what_transformers_does(make_reranker: Callable[[int], Path]) -> None:
    import torch

    from backends.embeddings.model import Reranker

    directory = make_reranker(1)
    assert find_kind(directory) == "reranker"
    reranker = Reranker(directory, "auto" if not torch.cuda.is_available() else "cpu")
    assert (reranker.info.kind, reranker.info.dimensions, reranker.info.max_seq_len) == ("reranker", None, 64)
    tokenizer, model = transformer(directory, "AutoModelForSequenceClassification")
    with torch.no_grad():
        expected = [model(**tokenizer([query], [text], return_tensors="pt")).logits.item() for query, text in PAIRS]
    np.testing.assert_allclose(reranker.judge(PAIRS), expected, atol=1e-4)
    assert len(set(np.round(expected, 3))) == len(PAIRS)
    assert reranker.count(PAIRS) == [len(tokenizer(query, text)["input_ids"]) for query, text in PAIRS]
    assert reranker.count([("a", "word " * 1000)])[0] > 1000


def test_what_sorts_into_classes_is_no_reranker(make_reranker: Callable[[int], Path]) -> None:
    from backends.embeddings.model import Reranker

    with pytest.raises(Unsupported, match="sorts texts into 3 classes"):
        Reranker(make_reranker(3), "cpu")


def test_a_model_without_attention_is_served_too(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    from backends.embeddings.model import EmbeddingModel

    directory = tmp_path / "static"
    tokenizer = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    tokenizer.no_truncation()
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)]).save_pretrained(str(directory))
    assert find_kind(directory) == "embedding"
    model = EmbeddingModel(directory, "cpu")
    info = model.info
    assert (info.dimensions, info.max_seq_len, info.vocab_size, info.architecture) == (16, None, None, "")
    assert model.count(["the cat", "x", "word " * 1000], Purpose()) == [2, 1, 1000]
    assert model.embed(["the cat", "x"], Purpose()).shape == (2, 16)


def test_a_gpu_that_is_not_there_is_said_to_be_missing() -> None:
    import torch

    from backends.embeddings.model import EmbeddingModel

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ModelLoadFailed, match="torch finds no GPU"):
        EmbeddingModel(MINILM, "cuda")
