"""Where the suites are kept."""

from __future__ import annotations

import pytest

from tests.third_party.suites import PackageCache


@pytest.fixture(scope="session")
def packages(pytestconfig: pytest.Config) -> PackageCache:
    """In pytest's own cache, which git ignores and `--cache-clear` empties."""
    assert pytestconfig.cache is not None, "the suites are kept in pytest's cache, which is off"
    return PackageCache(pytestconfig.cache.mkdir("third_party"))
