"""Embedding models and rerankers, loaded and to be loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.embeddings.client import EmbeddingClient
from backends.embeddings.messages import Device, Kind
from backends.process_client import ClientState
from common.sampling import RequestModel


class EmbeddingLoadRequest(RequestModel):
    embedding_model_name: str = Field(description="Folder in embedding_model_dir of the model to load.")
    embeddings_device: Device | None = Field(None, description="Where it computes; null: as embeddings_device says.")


class EmbeddingUnloadRequest(RequestModel):
    embedding_model_name: str | None = Field(None, description="Which of the loaded models; null: all of them.")


class EmbeddingLoaded(BaseModel):
    """As the last event of a language model's load."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: Literal["embedding_model"] = "embedding_model"
    module: int = 1
    modules: int = 1
    status: Literal["finished"] = "finished"


class EmbeddingParameters(BaseModel):
    """What a loaded model is."""

    kind: Kind
    max_seq_len: int | None  # tokens of one text; None: as many as there are
    dimensions: int | None  # None: a reranker
    prompts: list[str]  # names that prompt_name takes
    architecture: str
    device: str
    engine_version: str
    engine_state: ClientState
    engine_failure: str | None  # why it is not ready


class EmbeddingCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "Waypoint"
    parameters: EmbeddingParameters | None = None  # None: it is not loaded

    @classmethod
    def of(cls, name: str, created: int, client: EmbeddingClient) -> EmbeddingCard:
        info = client.info
        return cls(
            id=name,
            created=created,
            parameters=EmbeddingParameters(
                kind=info.kind,
                max_seq_len=info.max_seq_len,
                dimensions=info.dimensions,
                prompts=info.prompts,
                architecture=info.architecture,
                device=info.device,
                engine_version=info.engine_version,
                engine_state=client.state,
                engine_failure=client.failure,
            ),
        )


class EmbeddingModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingCard]
