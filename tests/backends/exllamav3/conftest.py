"""A loaded model for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends.exllamav3.model import ExllamaV3Container
from tests import models
from tests.conftest import MakeOnce
from tests.containers import loaded


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_mtp(make_once: MakeOnce) -> Path:
    return make_once("tiny-mtp", models.make_mtp)


@pytest.fixture(scope="module")
async def llama(tiny_llama: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_llama, chunk_size=256) as container:
        yield container
