"""Names of models and adapters -> their folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from common.errors import InvalidRequest, ModelNotFound, NotFound
from common.names import path_within

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
# What every embedding model has one of; sentence-transformers writes the second.
EMBEDDING_MODEL_FILES = (MODEL_CONFIG, "modules.json")


def model_folder(parent: Path, name: str, param: str = "model_name") -> Path:
    """Absolute path of the model `name`, a folder in `parent` or, as author/model, in a folder in it.

    Raises:
        InvalidRequest: the name is empty or leads out of `parent`. A folder that is linked into it is inside.
        ModelNotFound: there is no such folder, or it holds no config.json.
    """
    folder = _folder_within(parent, name, param, "the model directory")
    if not _holds(folder, (MODEL_CONFIG,)):
        raise ModelNotFound(
            f"There is no model {name!r}: the model directory has no such folder with a {MODEL_CONFIG}.", param=param
        )
    return folder


def adapter_folder(parent: Path, name: str, param: str = "name") -> Path:
    """Absolute path of the LoRA adapter `name`, as of a model.

    Raises:
        InvalidRequest: the name is empty or leads out of `parent`.
        NotFound: there is no such folder, or it holds no adapter_config.json.
    """
    folder = _folder_within(parent, name, param, "lora.lora_dir")
    if not _holds(folder, (ADAPTER_CONFIG,)):
        raise NotFound(
            f"There is no adapter {name!r}: lora.lora_dir has no such folder with an {ADAPTER_CONFIG}.", param=param
        )
    return folder


def embedding_folder(parent: Path, name: str, param: str) -> Path:
    """Absolute path of the embedding model or reranker `name`, as of a model.

    Raises:
        InvalidRequest: the name is empty or leads out of `parent`.
        ModelNotFound: there is no such folder, or it holds no model.
    """
    folder = _folder_within(parent, name, param, "embeddings.embedding_model_dir")
    if not _holds(folder, EMBEDDING_MODEL_FILES):
        raise ModelNotFound(
            f"There is no embedding model {name!r}: embeddings.embedding_model_dir has no such folder with a "
            f"{' or '.join(EMBEDDING_MODEL_FILES)}.",
            param=param,
        )
    return folder


def list_models(parent: Path) -> list[str]:
    """Names of the models in `model.model_dir`, sorted without regard to case; none where there is no such folder."""
    names = _folders_with((MODEL_CONFIG,), parent, "model.model_dir")
    return sorted(names, key=lambda name: (name.casefold(), name))


def list_draft_models(parent: Path) -> list[str]:
    """Names of the models in `draft_model.draft_model_dir`, sorted; none where there is no such folder."""
    return _folders_with((MODEL_CONFIG,), parent, "draft_model.draft_model_dir")


def list_adapters(parent: Path) -> list[str]:
    """Names of the adapters in `lora.lora_dir`, sorted; none where there is no such folder."""
    return _folders_with((ADAPTER_CONFIG,), parent, "lora.lora_dir")


def list_embedding_folders(parent: Path) -> list[str]:
    """Names of what may be embedding models in `embeddings.embedding_model_dir`, as of draft models."""
    return _folders_with(EMBEDDING_MODEL_FILES, parent, "embeddings.embedding_model_dir")


def created(path: Path) -> int:
    """When a file or folder was written last, in Unix seconds; 0 where it has gone, as a model in memory may outlive
    its folder."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0


def _folder_within(parent: Path, name: str, param: str, place: str) -> Path:
    folder = path_within(parent.absolute(), name)
    if folder is None:
        raise InvalidRequest(f"{param} {name!r} must name a folder inside {place}.", param=param)
    return folder


def _holds(folder: Path, files: Sequence[str]) -> bool:
    """Whether one of the files is there. Unlike with Path.is_file() also false for a name that is too long."""
    return any(os.path.isfile(folder / file) for file in files)


def _folders_with(files: Sequence[str], parent: Path, setting: str) -> list[str]:
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("{} {} cannot be read: {}", setting, parent, error.strerror)
        return []
    return sorted(name for name in names if _holds(parent / name, files))
