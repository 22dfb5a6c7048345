"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What is logged while a test runs, one message an item."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip("\n")), format="{message}", level="INFO")
    yield lines
    logger.remove(sink)
