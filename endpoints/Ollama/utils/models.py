"""Models as Ollama's clients are told of them: by their files, whether they are loaded or not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastapi import Request

from backends.client import EngineClient
from backends.embeddings.client import EmbeddingClient
from backends.exllamav3.model_files import CONFIG, read_object
from backends.manager import ModelStatus
from common.config_models import ModelParameters
from common.errors import InvalidRequest
from common.fim import fim_tokens
from common.names import tagged
from common.parsing.detection import AnswerSyntax, detect
from common.sandbox import bounded
from common.tabby_config import merge_load_settings
from common.templating import ChatTemplate, find_template
from endpoints.core.models import visible_folders
from endpoints.Ollama.types.model import Capability, Details, ListedModel, ModelShown, RunningModel
from endpoints.Ollama.types.response import timestamp
from endpoints.state import ServerState, loaded_info

EMBEDDING_FILE: Final = "modules.json"
# GGUF's names -> those of a config.json.
_INFO: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
# Until a model is unloaded that stays for ever: Ollama's clients want a date.
NEVER: Final = timedelta(days=100 * 365)
_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a model's folder say.

    Attributes:
        config: its config.json; empty where that cannot be read.
        size: bytes of all files.
    """

    name: str
    config: Mapping[str, Any]
    size: int
    modified_at: datetime
    digest: str

    @classmethod
    def read(cls, directory: Path, name: str) -> ModelFiles:
        """Blocks while files are looked at. They may go or change meanwhile."""
        try:
            config = read_object(directory / CONFIG)
        except InvalidRequest:  # a load says what is wrong with it
            config = {}
        sizes = sorted(_sizes(directory))
        digest = sha256(repr((name, config, sizes)).encode("utf-8", "replace")).hexdigest()
        return cls(name, config, sum(size for _, size in sizes), _modified_at(directory), digest)

    @property
    def family(self) -> str:
        return _text(self.config.get("model_type"))

    @property
    def details(self) -> Details:
        quantization = self.config.get("quantization_config")
        exl3 = quantization if isinstance(quantization, dict) and quantization.get("quant_method") == "exl3" else None
        return Details(
            format="safetensors" if exl3 is None else "exl3",
            family=self.family,
            families=[self.family],
            quantization_level=self._dtype if exl3 is None else f"{_text(exl3.get('bits'))}bpw",
        )

    @property
    def _dtype(self) -> str:
        dtype = _text(self.text_value("dtype") or self.text_value("torch_dtype"))
        return _DTYPES.get(dtype, dtype.upper())

    def text_value(self, key: str) -> object:
        """Of the part of the configuration that is about the language model."""
        inner = self.config.get("text_config")
        return self.config.get(key, inner.get(key) if isinstance(inner, dict) else None)

    def listed(self) -> ListedModel:
        name = tagged(self.name)
        return ListedModel(
            name=name,
            model=name,
            modified_at=timestamp(self.modified_at),
            size=self.size,
            digest=self.digest,
            details=self.details,
        )


def _text(value: object) -> str:
    """Of a configuration, whatever it holds; empty for nothing."""
    return "" if value is None else str(value).encode("utf-8", "replace").decode("utf-8")


def _sizes(directory: Path) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file():
                    yield entry.name, entry.stat().st_size
    except OSError:  # it may have gone since; the model in memory has not
        return


def _modified_at(directory: Path) -> datetime:
    try:
        return datetime.fromtimestamp((directory / CONFIG).stat().st_mtime, UTC)
    except OSError:
        return datetime.fromtimestamp(0, UTC)


# --- one model ----------------------------------------------------------------------------------------------------


class _Knowledge(NamedTuple):
    """What is known of a model beside its files.

    Attributes:
        context_length: tokens; None: as its files say.
    """

    capabilities: list[Capability]
    context_length: int | None = None
    template: ChatTemplate | None = None


def visible_models(request: Request, state: ServerState) -> dict[str, Path]:
    """By name, the models that the caller may use or load, and the embedding models that are loaded."""
    embedding = {name: client.directory for name, client in _embedding_models(state).items()}
    return visible_folders(request, state) | embedding


def _embedding_models(state: ServerState) -> dict[str, EmbeddingClient]:
    """Those that are up. Ollama has no rerankers."""
    return {name: client for name, client in state.embeddings.loaded.items() if client.info.kind == "embedding"}


async def shown(state: ServerState, directory: Path, name: str) -> ModelShown:
    """What there is to know of a model, more of one that is loaded."""
    embedding = _embedding_models(state).get(name)
    client = state.manager.client_of(directory)
    if embedding is not None:
        knowledge = _Knowledge(["embedding"], embedding.info.max_seq_len)
    elif client is not None:
        knowledge = await _known(state, client)
    else:
        model = merge_load_settings(state.settings, model_directory=directory, request={}).model
        knowledge = await state.prompts.run(lambda: _guessed(directory, model))
    return await asyncio.to_thread(lambda: _shown(ModelFiles.read(directory, name), knowledge))


async def _known(state: ServerState, client: EngineClient) -> _Knowledge:
    info, template, syntax = loaded_info(client), await state.template_of(client), await state.syntax_of(client)
    inserts = fim_tokens(info.control_tokens) is not None

    def find_out() -> list[Capability]:
        with bounded():
            return list(_capabilities(template, syntax, vision=info.use_vision, inserts=inserts))

    return _Knowledge(await state.prompts.run(find_out), info.max_seq_len, template)


def _guessed(directory: Path, model: ModelParameters) -> _Knowledge:
    """Of a model that is not loaded, whose tokens are not known."""
    try:
        template = find_template(directory, model.prompt_template)
    except InvalidRequest:  # a load says what is wrong with it
        template = None
    if (directory / EMBEDDING_FILE).is_file():
        return _Knowledge(["embedding"])
    with bounded():
        syntax = detect(template, (), model) if template is not None else None
        capabilities = list(_capabilities(template, syntax, vision=model.vision, inserts=False))
    given = model.max_seq_len if model.max_seq_len is not None and model.max_seq_len > 0 else None
    return _Knowledge(capabilities, given, template)


def _capabilities(
    template: ChatTemplate | None, syntax: AnswerSyntax | None, *, vision: bool, inserts: bool
) -> Iterator[Capability]:
    """
    Args:
        inserts: it can fill in the middle.
    """
    yield "completion"
    if template is not None and syntax is not None:
        # Where only the form of calls is known, the server describes the tools itself.
        if syntax.tool_format.value is not None or template.variant([{}]).traits.shows_tools:
            yield "tools"
        if syntax.thoughts.value is not None:
            yield "thinking"
    if vision:
        yield "vision"
    if inserts:
        yield "insert"


def _shown(files: ModelFiles, knowledge: _Knowledge) -> ModelShown:
    family = files.family
    info: dict[str, str | int] = {"general.architecture": family, "general.basename": files.name}
    for name, key in _INFO.items():
        if type(value := files.text_value(key)) is int:
            info[f"{family}.{name}"] = value
    if knowledge.context_length is not None:
        info[f"{family}.context_length"] = knowledge.context_length
    return ModelShown(
        modelfile=f"FROM {tagged(files.name)}\n",
        template=knowledge.template.source if knowledge.template is not None else "",
        details=files.details,
        model_info=info,
        capabilities=knowledge.capabilities,
        modified_at=timestamp(files.modified_at),
    )


# --- those that are up --------------------------------------------------------------------------------------------


class _Up(NamedTuple):
    """
    Attributes:
        memory: bytes; None or 0: about as much as its files.
        left: until it is unloaded if nobody uses it.
    """

    name: str
    directory: Path
    context_length: int
    on_gpu: bool
    memory: int | None = None
    left: timedelta = NEVER

    def listed(self) -> RunningModel:
        """Blocks while files are looked at."""
        listed = ModelFiles.read(self.directory, self.name).listed()
        size = self.memory or listed.size
        return RunningModel(
            name=listed.name,
            model=listed.model,
            size=size,
            digest=listed.digest,
            details=listed.details,
            expires_at=timestamp(datetime.now(UTC) + self.left),
            size_vram=size if self.on_gpu else 0,
            context_length=self.context_length,
        )


async def running(request: Request, state: ServerState) -> list[RunningModel]:
    """Those that are up, of the models that the caller may know of."""
    up: list[_Up] = []
    for name, directory in visible_folders(request, state).items():
        status, client = state.manager.status(directory), state.manager.client_of(directory)
        if client is not None and status.state == "loaded":
            up.append(_up(name, client, status))
    for name, embedder in _embedding_models(state).items():
        on_gpu = embedder.info.device.startswith("cuda")
        up.append(_Up(name, embedder.directory, embedder.info.max_seq_len or 0, on_gpu))
    return await asyncio.to_thread(lambda: [model.listed() for model in up])


def _up(name: str, client: EngineClient, status: ModelStatus) -> _Up:
    info = loaded_info(client)
    left = NEVER if status.idle_in is None else timedelta(seconds=min(status.idle_in, NEVER.total_seconds()))
    return _Up(name, client.directory, info.max_seq_len, info.device == "cuda", status.memory, left)
