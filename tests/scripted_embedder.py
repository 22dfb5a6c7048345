"""The process of an embedding model without a model: what words of texts say happens, over the real protocol.

    python -m tests.scripted_embedder

A token is a word, and a vector counts the letters a to h. A folder whose name contains "rerank" holds a reranker, whose
score is the number of letters that query and document share; one whose name contains "broken" cannot be loaded, one
whose name contains "foreign" has code of its own, and one whose name contains "slow" takes its time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backends.embeddings import worker
from backends.embeddings.computing import Pair, Rows
from backends.embeddings.messages import Device, EmbeddingModelInfo, Kind
from backends.embeddings.prompts import Purpose

LETTERS = "abcdefgh"
MAX_SEQ_LEN = 20
FOREVER = 3600.0
STEP_SECONDS = 0.02  # of a text with the word SLOW


def _obey(text: str) -> None:
    words = text.split()
    if "CRASH" in words:
        os._exit(3)
    if "HANG" in words:
        time.sleep(FOREVER)
    if "FAIL" in words:
        raise ValueError("it was told to fail")
    if "MEMORY" in words:
        raise RuntimeError("CUDA error: out of memory")
    if "BREAK" in words:
        raise RuntimeError("CUDA error: device-side assert triggered")
    if "SLOW" in words:
        time.sleep(STEP_SECONDS)


def info(directory: Path, kind: Kind, device: Device) -> EmbeddingModelInfo:
    return EmbeddingModelInfo(
        name=directory.name,
        directory=str(directory),
        kind=kind,
        architecture="Scripted",
        max_seq_len=MAX_SEQ_LEN,
        dimensions=len(LETTERS) if kind == "embedding" else None,
        vocab_size=len(LETTERS) if kind == "embedding" else None,
        prompts=["query"],
        device=device,
        engine_version="1",
    )


def vector(text: str) -> list[float]:
    return [math.nan if "NAN" in text else float(text.count(letter)) for letter in LETTERS]


class ScriptedEmbedder:
    """
    Attributes:
        steps: the texts of each step.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        self.default_prompt: str | None = None
        self.prompts = {"query": "aaaa "}
        self.info = info(directory, "embedding", device)
        self.steps: list[list[str]] = []

    def count(self, texts: Sequence[str], purpose: Purpose) -> list[int]:
        return [len((purpose.prompt + text).split()) for text in texts]

    def embed(self, texts: Sequence[str], purpose: Purpose) -> Rows:
        self.steps.append(list(texts))
        for text in texts:
            _obey(text)
        return np.array([vector(purpose.prompt + text) for text in texts], dtype=np.float32)

    def embed_ids(self, ids: Sequence[Sequence[int]]) -> Rows:
        return self.embed(["".join(LETTERS[each] for each in text) for text in ids], Purpose())


class ScriptedReranker:
    def __init__(self, directory: Path, device: Device) -> None:
        self.info = info(directory, "reranker", device)

    def count(self, pairs: Sequence[Pair]) -> list[int]:
        return [len(" ".join(pair).split()) for pair in pairs]

    def judge(self, pairs: Sequence[Pair]) -> Rows:
        for _, document in pairs:
            _obey(document)
        shared = [len(set(query) & set(document) & set(LETTERS)) for query, document in pairs]
        return np.array(shared, dtype=np.float32)


def open_model(directory: Path, device: Device) -> ScriptedEmbedder | ScriptedReranker:
    print("what a library prints must not reach the server's messages")
    if "slow" in directory.name:
        time.sleep(FOREVER)
    if "foreign" in directory.name:
        raise ValueError("pass the argument trust_remote_code=True")
    if "broken" in directory.name:
        raise OSError(f"cannot read {directory}/model.safetensors")
    return (ScriptedReranker if "rerank" in directory.name else ScriptedEmbedder)(directory, device)


if __name__ == "__main__":
    worker.run(open_model)
