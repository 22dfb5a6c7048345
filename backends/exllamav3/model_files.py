"""The files of a model's folder, checked before anything is loaded: the engine would find out late what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidRequest
from common.limits import MAX_CONFIG_BYTES

CONFIG = "config.json"
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
# The first bytes of a safetensors file, little-endian: how long its header is, which is JSON.
LENGTH = struct.Struct("<Q")
# Of a header; the format's own limit.
MOST_HEADER_BYTES = 100_000_000
# Where configurations keep what they say of the language model; the empty one is their top.
_OF_TEXT: Final = ("", "text_config", "llm_config")


def check_files(directory: Path) -> None:
    """Look into the files that are there, without reading a weight.

    Raises:
        InvalidRequest: one is cut off or damaged, or says what cannot be true. Says which.
    """
    _check_kinds(directory)
    config = read_object(directory / CONFIG)
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (directory / name).exists():
            read_object(directory / name)
    complete = not _missing_weights(directory)  # reads the index
    tensors = [name for path in sorted(directory.glob(WEIGHTS)) for name in read_tensors(path)]
    if complete:
        _check_layers(directory / CONFIG, config, tensors)


def check_complete(directory: Path) -> None:
    """Raise InvalidRequest where a download has not brought all files with weights."""
    if missing := _missing_weights(directory):
        raise InvalidRequest(f"{directory.name} is incomplete: {', '.join(missing)} missing. Download it again.")


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises `InvalidRequest` for anything else."""
    try:
        if path.stat().st_size > limit:
            raise _damaged(path, f"is larger than {limit // 1_000_000} MB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _damaged(path, f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _damaged(path, f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nested too deeply
        raise _damaged(path, "is not JSON that can be read") from error
    if not isinstance(content, dict):
        raise _damaged(path, "holds no JSON object")
    return content


def _check_kinds(directory: Path) -> None:
    try:
        for path in sorted(directory.iterdir()):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise _damaged(path, "is neither a file nor a folder")  # to open a pipe could take for ever
    except OSError as error:
        raise InvalidRequest(f"The folder {directory.name} cannot be read: {error.strerror}.") from error


def _missing_weights(directory: Path) -> list[str]:
    missing = sorted(name for name in _named_weights(directory) if not (directory / name).is_file())
    return missing or ([] if any(directory.glob(WEIGHTS)) else [WEIGHTS])


def _named_weights(directory: Path) -> Iterator[str]:
    """Files that the index says the weights are in."""
    path = directory / INDEX
    if not path.exists():
        return
    weight_map = read_object(path, MOST_HEADER_BYTES).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise _damaged(path, "holds no object weight_map")
    for name in set(weight_map.values()):
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise _damaged(path, f"names {name!r}, which is no file of the folder")
        yield name


def _check_layers(path: Path, config: dict[str, Any], tensors: list[str]) -> None:
    """Refuse more layers than there are weights for: the engine builds all of them before it misses any.

    Each layer has tensors with its number in their names, as "model.layers.7.mlp.up_proj.weight".
    """
    numbers = {part for name in tensors for part in name.split(".") if part.isdecimal()}
    for place in _OF_TEXT:
        part = config.get(place) if place else config
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > len(numbers):
            field = f"{place}.num_hidden_layers".lstrip(".")
            raise _damaged(path, f"says {field} {layers}, but there are weights for {len(numbers)} at most")


def read_tensors(path: Path) -> dict[str, Any]:
    """What a file with weights says of its tensors, by their names: dtype, shape and where each lies in it.

    Raises:
        InvalidRequest: the file is cut off or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = LENGTH.unpack(file.read(LENGTH.size))[0] if size >= LENGTH.size else size
            if length > min(size - LENGTH.size, MOST_HEADER_BYTES):
                raise _damaged(path, "is cut off or damaged: its header does not fit")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "is damaged: its header holds no object")
    room = size - LENGTH.size - length
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if not _fits(tensor, room):
            raise _damaged(path, f"is cut off or damaged: the tensor {name} lies outside of it")
    return header


def _fits(tensor: Any, room: int) -> bool:
    """Whether what a header says of a tensor can be true."""
    match tensor:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            return 0 <= begin <= end <= room and all(isinstance(size, int) and size >= 0 for size in shape)
    return False


def _damaged(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path.name} of {path.parent.name} {what}. Download the file again.")
