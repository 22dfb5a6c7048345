"""Options of the engine's generator beyond those that it is always given.

One that has the engine's own default is not passed on, so that defaults stay the engine's, and a version without the
option is not asked for it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from backends.exllamav3.engine import ENGINE_VERSION, Cache, Generator, Model
from common.config_models import DraftModelConfig, ModelConfig
from common.errors import InvalidRequest

# The beginning of an n-gram corpus: magic, version, bytes of the JSON that follows, bytes of the rest unpacked.
CORPUS_PREFIX = struct.Struct("<8sIIQ")
CORPUS_MAGIC = b"EXL3SAM\0"
MOST_CORPUS_HEADER_BYTES = 16 * 1024**2
# A corpus holds token ids: it fits the models whose files of these names are the same to the byte.
CORPUS_IDENTITY = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


def changed(settings: BaseModel, *names: str) -> dict[str, Any]:
    """Those of the named settings that do not have their default; the engine's is the same."""
    fields = type(settings).model_fields
    return {name: value for name in names if (value := getattr(settings, name)) != fields[name].default}


def known_options(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those that this version of the engine has, which would swallow others without a word, and advice on the rest."""
    known = inspect.signature(Generator.__init__).parameters
    unknown = sorted(options.keys() - known.keys())
    advice = [f"{name} has no effect: exllamav3 {ENGINE_VERSION} does not have it." for name in unknown]
    return {name: value for name, value in options.items() if name in known}, advice


def has_scan_states(cache: Cache) -> bool:
    """Whether there are layers whose state can be kept in another precision."""
    return any(hasattr(layer, "set_state_dtype") for layer in cache.recurrent_layers.values())


# --- prefill ----------------------------------------------------------------------------------------------------------


def check_shared_chunk(settings: ModelConfig, chunk_size: int) -> None:
    """Raise InvalidRequest where chunks are to grow while answers are generated.

    Args:
        chunk_size: in force.
    """
    if settings.shared_chunk_size is not None and settings.shared_chunk_size > chunk_size:
        raise InvalidRequest(
            f"model.shared_chunk_size {settings.shared_chunk_size} is larger than chunk_size {chunk_size}. Lower it, "
            "or leave it out for half of chunk_size.",
            param="model.shared_chunk_size",
        )


def prefill_options(settings: ModelConfig, chunk_size: int) -> dict[str, Any]:
    options = changed(settings, "shared_chunk_size", "prefill_cooldown")
    if "shared_chunk_size" in options:  # a checkpoint target may have lowered chunk_size after the check
        options["shared_chunk_size"] = min(options["shared_chunk_size"], chunk_size)
    return options


# --- drafting ---------------------------------------------------------------------------------------------------------


def draft_options(
    settings: DraftModelConfig, drafter: Model | None, directory: Path, *, tensor_parallel: bool
) -> tuple[dict[str, Any], list[str]]:
    """Arguments of the generator, and advice on settings that have no effect.

    Args:
        drafter: the model that drafts, if one does.
        directory: of the model that is drafted for.

    Raises:
        InvalidRequest: the corpus cannot be used.
    """
    options = changed(settings, "hybrid_draft_tokens")
    advice = list(_draft_advice(settings, drafter))
    drafts = drafter is not None or settings.draft_mode == "ngram" or settings.hybrid_draft_tokens > 0

    if settings.ngram_corpus:
        _check_corpus(Path(settings.ngram_corpus), settings.draft_mode, directory)
        options["ngram_corpus"] = settings.ngram_corpus
    if changed(settings, "draft_confidence"):
        if drafter is not None and settings.dynamic_draft:
            options["draft_confidence"] = settings.draft_confidence
        else:
            advice.append("draft_model.draft_confidence has no effect without dynamic_draft and a model that drafts.")
    if settings.draft_max_rows:
        if drafts:
            options["draft_max_rows"] = settings.draft_max_rows
        else:
            advice.append("draft_model.draft_max_rows has no effect: nothing is drafted.")
    if settings.sparse_draft_head:
        # Others than these have output layers of their own.
        if drafter is not None and drafter.caps.get("attach_target") and not tensor_parallel:
            options["sparse_draft_head"] = settings.sparse_draft_head
        else:
            advice.append(
                "draft_model.sparse_draft_head has no effect: it is for drafters that use the model's own output "
                "layer, as MTP, without tensor_parallel."
            )
    return options, advice


def _draft_advice(settings: DraftModelConfig, drafter: Model | None) -> Iterator[str]:
    mode = settings.draft_mode
    if settings.draft_model_name and mode in ("mtp", "ngram"):
        yield f"draft_model.draft_model_name has no effect with draft_mode {mode}."
    if mode == "model" and drafter is None:
        for name in changed(settings, "draft_num_tokens", "dynamic_draft", "draft_cache_mode", "draft_gpu_split"):
            yield f"draft_model.{name} has no effect: no draft_model_name is set, nor another draft_mode."
    if mode in ("model", "mtp") and changed(settings, "ngram_match_min"):
        yield "draft_model.ngram_match_min has no effect without draft_mode ngram."


def _check_corpus(path: Path, draft_mode: str, directory: Path) -> None:
    param = "draft_model.ngram_corpus"
    if draft_mode != "ngram":
        raise InvalidRequest(
            f"{param} is for draft_mode ngram, not {draft_mode}. Set draft_mode to ngram, or leave it out.", param=param
        )
    try:
        identity = _corpus_identity(path)
    except OSError as error:
        raise InvalidRequest(f"{param} {path} cannot be read: {error.strerror}. Name a file.", param=param) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InvalidRequest(
            f"{param} {path} is no index that exllamav3 can read. Make it with the engine's own tool.", param=param
        ) from error
    for name in CORPUS_IDENTITY:
        file = directory / name
        own = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None
        if identity.get(name) != own:
            raise InvalidRequest(
                f"{param} {path} was made with another tokenizer: {name} of {directory.name} differs. Make one with "
                "this model's.",
                param=param,
            )
    if importlib.util.find_spec("zstandard") is None:
        raise InvalidRequest(
            f"{param} needs the package zstandard. Install it with: pip install zstandard", param=param
        )


def _corpus_identity(path: Path) -> dict[str, str]:
    """SHA-256 of the tokenizer's files that a corpus was made with, by name."""
    with path.open("rb") as file:
        magic, version, size, _ = CORPUS_PREFIX.unpack(file.read(CORPUS_PREFIX.size))
        if magic != CORPUS_MAGIC or version != 1 or size > MOST_CORPUS_HEADER_BYTES:
            raise ValueError("not a corpus")
        identity = json.loads(file.read(size))["tokenizer"]["files"]
    return {str(name): str(digest) for name, digest in identity.items()}
