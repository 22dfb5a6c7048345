"""CompatCanary's live probes of the modern profile, which has those of the chat profile and of the Responses API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.serving import served
from tests.third_party.suites import AllowList, Outcome, PackageCache, Results, SuiteError, run_command, set_defaults

PACKAGE = "compatcanary@0.2.2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_modern_profile(packages: PackageCache, smollm2: Path, tmp_path: Path) -> None:
    folder = packages.npm(PACKAGE)
    with served(tmp_path, model=smollm2) as server:
        # The probes set no limit, and on a CPU the model's own end may be far. A call has to find room all the same.
        set_defaults(server, max_tokens=64, temperature=0)
        results = scan(folder, server.base_url, server.api_key, smollm2.name, tmp_path / "report.json")
    AllowList().judge(results)  # 100 of 100: none may fail


def scan(folder: Path, base_url: str, api_key: str, model: str, report: Path) -> Results:
    """Run the probes; one that only warns has failed here."""
    node = shutil.which("node")
    if node is None:
        raise SuiteError("node is not installed")
    arguments = ["--base-url", f"{base_url}/v1", "--model", model, "--profile", "modern", "--timeout", "120"]
    run = run_command(
        [node, folder / "src" / "cli.js", "scan", *arguments, "--format", "json", "--output", report],
        variables={"OPENAI_API_KEY": api_key},
        timeout=480,
    )
    if not report.exists():
        raise SuiteError(f"compatcanary ended with status {run.returncode}:\n{run.stdout}")
    probes = json.loads(report.read_text(encoding="utf-8"))["results"]
    return {
        probe["id"]: Outcome("passed" if probe["status"] == "pass" else "failed", probe["summary"]) for probe in probes
    }
