"""What a folder holds, by its small files: an embedding model, a reranker, or what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from backends.embeddings.messages import Kind
from backends.exllamav3.model_files import CONFIG, read_object
from common.errors import InvalidRequest, Unsupported
from common.limits import MAX_CONFIG_BYTES

MODULES: Final = "modules.json"
OWN_CONFIG: Final = "config_sentence_transformers.json"
LIBRARY: Final = "sentence_transformers."
KINDS: Final[dict[str, Kind]] = {"SentenceTransformer": "embedding", "CrossEncoder": "reranker"}
# Ends of the names of architectures that write text. As embedding models they come with a modules.json.
_WRITERS: Final = ("ForCausalLM", "ForConditionalGeneration")
_JUDGES: Final = "ForSequenceClassification"


def find_kind(directory: Path) -> Kind:
    """
    Raises:
        InvalidRequest: a file is damaged.
        Unsupported: the model is of another kind, or needs code of its own.
    """
    _check_modules(directory)
    own = read_object(directory / OWN_CONFIG) if (directory / OWN_CONFIG).is_file() else {}
    if (name := own.get("model_type")) is not None:
        if name not in KINDS:
            raise Unsupported(f"{directory.name} is a {name}; served are {' and '.join(KINDS)} models.")
        return KINDS[name]
    if (directory / MODULES).is_file():
        return "embedding"
    architecture = find_architecture(directory)
    if architecture.endswith(_WRITERS):
        raise Unsupported(
            f"{directory.name} is a language model ({architecture}), and has no {MODULES} that makes it an embedding "
            "model."
        )
    return "reranker" if architecture.endswith(_JUDGES) else "embedding"


def find_architecture(directory: Path) -> str:
    """As the configuration names it; "" where it does not."""
    if not (directory / CONFIG).is_file():
        return ""
    named = read_object(directory / CONFIG).get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _check_modules(directory: Path) -> None:
    """sentence-transformers refuses code of others too, but names an option of its own as the remedy."""
    path = directory / MODULES
    if not path.is_file():
        return
    for module in _read_list(path):
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str) or not kind.startswith(LIBRARY):
            raise Unsupported(
                f"{directory.name} needs code that comes with the model ({MODULES} names {kind!r}), which is never run."
            )


def _read_list(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, list):
        raise InvalidRequest(f"{path.name} of {path.parent.name} is damaged. Download the model again.")
    return content
