from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_inputs() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
