"""Servers with embedding models beside the scripted engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from backends.embeddings.client import WORKER_COMMAND
from backends.embeddings.manager import EmbeddingManager
from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine

SCRIPTED = (sys.executable, "-m", "tests.scripted_embedder")


@contextmanager
def embedding_server(
    root: Path, model_dir: Path, *, command: Sequence[str] = WORKER_COMMAND, **settings: object
) -> Iterator[RunningServer]:
    """A server with one scripted language model, "alpha", that is not loaded.

    Args:
        root: folder of its own.
        model_dir: where embedding models are.
        command: of their processes.
        settings: of the section "embeddings"; `model` is that section.
    """
    engine = ScriptedEngine(root)
    engine.add_model("alpha")
    model = settings.pop("model", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("endpoints.state.EmbeddingManager", partial(EmbeddingManager, worker_command=command))
        server = running_server(engine, model=model, embeddings={"embedding_model_dir": str(model_dir), **settings})
        with server.running():
            yield server


def add_models(model_dir: Path, *names: str) -> Path:
    """Folders that the scripted process answers for."""
    for name in names:
        (model_dir / name).mkdir(parents=True)
        (model_dir / name / "config.json").write_text("{}", encoding="utf-8")
    return model_dir


def load(server: RunningServer, name: str) -> None:
    response = server.admin.post("/v1/model/embedding/load", json={"embedding_model_name": name})
    assert response.status_code == 200, response.text
