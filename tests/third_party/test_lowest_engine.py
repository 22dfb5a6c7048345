"""The CPU kernels on the lowest version of the engine that they are made for; all other tests run on the newest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.exllamav3.engine import ENGINE_REQUIREMENT
from tests.third_party.suites import PackageCache, run_command

ROOT = Path(__file__).parents[2]
FILES = ("cpu", "test_engine_logits.py", "test_engine_generator.py", "test_engine_drafting.py", "test_quantised.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_kernels_fit_the_lowest_supported_engine(packages: PackageCache) -> None:
    lowest = next(specifier.version for specifier in ENGINE_REQUIREMENT if specifier.operator == ">=")
    engine = packages.wheel(f"exllamav3=={lowest}", Path(sys.executable), ["exllamav3"])
    files = [f"tests/backends/exllamav3/{name}" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    shown = [sys.executable, "-c", "from backends.exllamav3.engine import ENGINE_VERSION; print(ENGINE_VERSION)"]
    variables = {"PYTHONPATH": str(engine)}  # comes before the installed one
    assert lowest in run_command(shown, folder=ROOT, variables=variables, timeout=100).stdout
    run = run_command([*command, *files], folder=ROOT, variables=variables, timeout=1700)
    assert run.returncode == 0, run.stdout[-8000:]
