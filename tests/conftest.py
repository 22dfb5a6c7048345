"""Fixtures that several folders use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripted import ScriptedEngine


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
