"""pytest plugin that lets vLLM's HTTP tests run without vLLM.

Every import from `vllm` succeeds. What the HTTP tests need has a stand-in (`PROVIDED`); any other name is an empty
class, enough for an import or an annotation. Tests that use vLLM's insides and no server are deselected.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MODEL_DIR = Path(os.environ["SUITE_MODEL"])


def get_tokenizer(tokenizer_name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL_DIR)
    return tokenizer


class ModelConfig:
    def __init__(self, **options: Any) -> None:
        self._config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


def download(*names: str, **options: Any) -> str:
    """Stands for models and LoRAs alike: our server has one model, whatever a request calls it."""
    return str(MODEL_DIR)


PLATFORM = SimpleNamespace(is_rocm=lambda: False, is_xpu=lambda: False)
PROVIDED = {
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.model_executor.model_loader.weight_utils.download_weights_from_hf": download,
    "vllm.platforms.current_platform": PLATFORM,
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
    "vllm.transformers_utils.repo_utils.hf_api": lambda: SimpleNamespace(snapshot_download=download),
}


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # not one that somebody imports: the import system asks for these
        return PROVIDED.get(f"{self.__name__}.{name}") or type(name, (), {})


class StandInFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is no code behind it."""


sys.meta_path.insert(0, StandInFinder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not uses_server(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def uses_server(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    by_fixture = any(word in name for name in item.fixturenames for word in ("server", "client"))
    return by_fixture or "RemoteOpenAIServer" in inspect.getsource(item.function)
