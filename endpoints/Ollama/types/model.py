"""What Ollama's clients are told about models."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

# Of the Ollama whose API this is: clients compare it with what they need.
OLLAMA_VERSION: Final = "0.13.0"

Capability: TypeAlias = Literal["completion", "tools", "thinking", "vision", "insert", "embedding"]


class Version(BaseModel):
    version: str = OLLAMA_VERSION


class Details(BaseModel):
    """
    Attributes:
        family: the `model_type` of its config.json.
        parameter_size: empty, as a model's files do not say it.
        quantization_level: such as 4.0bpw, or BF16.
    """

    parent_model: str = ""
    format: Literal["exl3", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class ListedModel(BaseModel):
    """
    Attributes:
        modified_at: of its config.json.
        size: bytes of its files.
        digest: of its config.json and of the names and sizes of its files, not of what they hold.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class ModelList(BaseModel):
    models: list[ListedModel]


class RunningModel(BaseModel):
    """
    Attributes:
        size: bytes of memory.
        size_vram: of these, on GPUs.
        expires_at: when it is unloaded if nobody uses it.
    """

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(BaseModel):
    models: list[RunningModel]


class ModelShown(BaseModel):
    """
    Attributes:
        template: in Jinja, not in Go's language.
        model_info: under the names of GGUF.
    """

    model_config = ConfigDict(protected_namespaces=())

    modelfile: str
    parameters: str = ""
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[Capability]
    modified_at: str
