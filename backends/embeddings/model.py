"""Embedding models and rerankers of sentence-transformers. Only the process of such a model imports this."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer, __version__
from torch import Tensor, nn

from backends.embeddings.messages import Device, EmbeddingModelInfo, Kind
from backends.embeddings.model_files import find_architecture
from backends.embeddings.prompts import Purpose
from common.errors import ModelLoadFailed, Unsupported

Rows: TypeAlias = NDArray[np.float32]

# Above it, what tokenizers say of a length that nobody has set.
LONGEST = 1 << 24
# It warns of texts that are too long, which are counted here to find that out.
logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)


class EmbeddingModel:
    """Makes vectors of texts, and of the token ids of texts.

    Attributes:
        info: what it is.
        prompts: texts to put before what is given, by name.
        default_prompt: name of the one for texts of which nothing is said.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        """Load it. Raises `ServerError`, or whatever the library does for files that it cannot use."""
        device = choose_device(device)
        self._model = model = SentenceTransformer(str(directory), **_options(device))
        self.prompts: dict[str, str] = {name: text for name, text in model.prompts.items() if text}
        self.default_prompt = model.default_prompt_name
        self.info = _describe(model, directory, "embedding", device, self.prompts)

    def count(self, texts: Sequence[str], purpose: Purpose) -> list[int]:
        """Tokens that each text would take if all were read."""
        return _lengths(self._model.preprocess(list(texts), prompt=purpose.prompt, **_whole(purpose.task)))

    def embed(self, texts: Sequence[str], purpose: Purpose) -> Rows:
        """A vector for each text, not normalised; of those that are too long, of what fits."""
        task: dict[str, Any] = {} if purpose.task is None else {"task": purpose.task}
        vectors = self._model.encode(
            list(texts), prompt=purpose.prompt, batch_size=len(texts), show_progress_bar=False, **task
        )
        return np.asarray(vectors, dtype=np.float32)

    def embed_ids(self, ids: Sequence[Sequence[int]]) -> Rows:
        """As `embed()`, of token ids as they are. Only for a model with a `vocab_size`."""
        tokenizer = self._model.tokenizer
        padded = nn.utils.rnn.pad_sequence(
            [torch.tensor(each) for each in ids],
            batch_first=True,
            padding_value=tokenizer.pad_token_id or 0,
            padding_side=tokenizer.padding_side,
        )
        mask = nn.utils.rnn.pad_sequence(
            [torch.ones(len(each), dtype=torch.long) for each in ids],
            batch_first=True,
            padding_side=tokenizer.padding_side,
        )
        device = self._model.device
        with torch.inference_mode():
            features = self._model({"input_ids": padded.to(device), "attention_mask": mask.to(device)})
        vectors: Tensor = features["sentence_embedding"]
        return vectors.float().cpu().numpy()


class Reranker:
    """Says how well a document fits a query.

    Attributes:
        info: what it is.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        """As `EmbeddingModel`."""
        device = choose_device(device)
        self._model = model = CrossEncoder(str(directory), **_options(device))
        if model.num_labels != 1:
            raise Unsupported(
                f"{directory.name} sorts texts into {model.num_labels} classes; a reranker gives one score."
            )
        self.info = _describe(model, directory, "reranker", device, {})

    def count(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens that each query and document would take together if all were read."""
        prompt = self._model.prompts.get(self._model.default_prompt_name or "")
        return _lengths(self._model.preprocess(list(pairs), prompt=prompt, **_whole()))

    def judge(self, pairs: Sequence[tuple[str, str]]) -> Rows:
        """The score of each document, as the model gives it."""
        scores = self._model.predict(
            list(pairs), batch_size=len(pairs), show_progress_bar=False, activation_fn=nn.Identity()
        )
        return np.asarray(scores, dtype=np.float32)


def choose_device(device: Device) -> Device:
    """Which of "cpu" and "cuda" it is. Raises `ModelLoadFailed` where there is no GPU."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ModelLoadFailed("embeddings_device is cuda, but torch finds no GPU. Set it to cpu or auto.")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


def _options(device: Device) -> dict[str, Any]:
    return {
        "device": device,
        "trust_remote_code": False,
        "local_files_only": True,
        # Half precision is slow on CPUs, and not for every operation there.
        "model_kwargs": {"dtype": torch.float32} if device == "cpu" else None,
    }


def _describe(
    model: SentenceTransformer | CrossEncoder, directory: Path, kind: Kind, device: Device, prompts: dict[str, str]
) -> EmbeddingModelInfo:
    length = model.max_seq_length
    network = model.transformers_model
    vocabulary = network.get_input_embeddings() if network is not None and "text" in model.modalities else None
    vocab_size = vocabulary.num_embeddings if isinstance(vocabulary, nn.Embedding) else None
    if vocab_size is not None and len(model.tokenizer) < vocab_size // 2:
        # Without its files, it is made of nothing but special tokens, and every word is unknown.
        raise ModelLoadFailed(
            f"The tokenizer of {directory.name} knows {len(model.tokenizer)} of the model's {vocab_size} tokens: its "
            "files are missing. Download the model again."
        )
    return EmbeddingModelInfo(
        name=directory.name,
        directory=str(directory),
        kind=kind,
        architecture=find_architecture(directory),
        max_seq_len=int(length) if length is not None and length < LONGEST else None,
        dimensions=model.get_embedding_dimension() if isinstance(model, SentenceTransformer) else None,
        vocab_size=vocab_size,
        prompts=list(prompts),
        device=device,
        engine_version=__version__,
    )


def _whole(task: str | None = None) -> dict[str, Any]:
    """Arguments that have texts tokenised to their ends."""
    return {"processing_kwargs": {"text": {"truncation": False}}, **({} if task is None else {"task": task})}


def _lengths(features: dict[str, Any]) -> list[int]:
    if "attention_mask" in features:
        lengths: list[int] = features["attention_mask"].sum(dim=1).tolist()
        return lengths
    # A model without attention: the ids of all texts in a row, and where each begins.
    ends = [*features["offsets"].tolist()[1:], len(features["input_ids"])]
    return [end - begin for begin, end in zip(features["offsets"].tolist(), ends, strict=True)]
