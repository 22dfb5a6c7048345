"""The soaks, for a minute: `python -m tests.soak` and `python -m tests.soak.swaps` run for as long as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

SECONDS = 80


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak(tiny_llama: Path, tiny_hybrid: Path, tmp_path: Path) -> None:
    assert tiny_llama.parent == tiny_hybrid.parent
    rhythm = ["--minutes", str(SECONDS / 60), "--kill-every", "25", "--load-every", "20", "--burst-every", "30"]
    command = [sys.executable, "-m", "tests.soak", *rhythm, "--models", str(tiny_llama.parent)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (tmp_path / "report.txt").write_text(run.stdout, encoding="utf-8")
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak_of_ten_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak.swaps", "--minutes", "1"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (tmp_path / "report.txt").write_text(run.stdout, encoding="utf-8")
    assert run.returncode == 0, run.stdout
