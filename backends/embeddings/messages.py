"""The records between the server and a process with an embedding model or a reranker.

The frames, `Cancel`, `Shutdown`, `Failed`, `Cancelled`, `LoadFailed` and `Log` are those of `backends.messages`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from backends.messages import Cancel, Cancelled, Failed, LoadFailed, Log, Shutdown

Kind: TypeAlias = Literal["embedding", "reranker"]
Device: TypeAlias = Literal["cpu", "auto", "cuda"]
Input: TypeAlias = str | list[int]  # a text, or token ids that are used as they are


class EmbeddingModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is."""

    name: str  # folder name
    directory: str
    kind: Kind  # a reranker judges a query and a document together, and embeds nothing
    architecture: str
    max_seq_len: int | None  # tokens of one text, or of query and document; None: as many as there are
    dimensions: int | None  # None: a reranker
    vocab_size: int | None  # None: it takes no token ids
    prompts: list[str]  # names of texts that it wants before what it is given
    device: str
    engine_version: str


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How texts are embedded."""

    dimensions: int | None = None  # keep so many of each vector, for models that were trained for it; None: all
    normalize: bool = True  # to length 1, after `dimensions`
    truncate: bool | None = None  # of texts that are too long take what fits; None: as embeddings_truncate says
    input_type: str | None = None  # what the texts are, "query" or "document"; see `backends.embeddings.prompts`
    prompt_name: str | None = None  # instead: one of the model's prompts


# --- server to process --------------------------------------------------------------------------------------------


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """The first message, sent once. Answered by `ModelLoaded` or `LoadFailed`."""

    directory: str  # absolute
    device: Device
    batch_tokens: int | None  # see `EmbeddingsConfig.embeddings_batch_tokens`


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Computing` now and then, and then by `Embedded`."""

    id: str
    inputs: list[Input]
    options: EmbedOptions
    param: str  # path of the request's field with the inputs, for errors


class Rank(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Computing` now and then, and then by `Ranked`."""

    id: str
    query: str
    documents: list[str]
    truncate: bool  # as in EmbedOptions
    raw: bool  # scores of a reranker as they are, instead of between 0 and 1


ToEmbedder: TypeAlias = LoadModel | Embed | Rank | Cancel | Shutdown


# --- process to server --------------------------------------------------------------------------------------------


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    info: EmbeddingModelInfo


class Computing(msgspec.Struct, frozen=True, tag=True):
    """A part of a request is done."""

    id: str


class Embedded(msgspec.Struct, frozen=True, tag=True):
    id: str
    vectors: list[bytes]  # in the order of the inputs; float32, little-endian
    tokens: int  # of all inputs, what the model adds included


class Ranked(msgspec.Struct, frozen=True, tag=True):
    id: str
    scores: list[float]  # in the order of the documents
    tokens: int


FromEmbedder: TypeAlias = ModelLoaded | LoadFailed | Computing | Embedded | Ranked | Failed | Cancelled | Log

to_embedder_decoder = msgspec.msgpack.Decoder(ToEmbedder)
from_embedder_decoder = msgspec.msgpack.Decoder(FromEmbedder)
