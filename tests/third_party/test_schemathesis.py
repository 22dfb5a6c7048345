"""schemathesis: data made from our openapi.json, valid and invalid, never gets a server error, and always an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import ServerProcess, served
from tests.third_party.suites import PackageCache, run_command, set_defaults

REQUIREMENT = "schemathesis==4.32.5"
GENERATION = r"/v1/.*completions$"
# After an unload there is no model, and 503 is the right answer to all that follows; a download needs the network.
LEFT_OUT = rf"{GENERATION}|/model/unload$|/download"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a model that has a BOS token, and so takes the empty prompts that are sent most."""
    with served(tmp_path_factory.mktemp("server"), "--max-seq-len", "256", model=tiny_llama) as server:
        yield server


def test_generation(packages: PackageCache, server: ServerProcess, tmp_path: Path) -> None:
    set_defaults(server, force=True, max_tokens=2)  # whatever a request says: its fields matter here, not the text
    arguments = ["--include-path-regex", GENERATION, "--phases", "coverage,fuzzing"]
    fuzz(packages, server, server.api_key, tmp_path, *arguments)


def test_everything_else(packages: PackageCache, server: ServerProcess, tmp_path: Path) -> None:
    arguments = ["--exclude-path-regex", LEFT_OUT, "--phases", "fuzzing"]
    fuzz(packages, server, server.admin_key, tmp_path, *arguments)


def fuzz(packages: PackageCache, server: ServerProcess, key: str, folder: Path, *arguments: str) -> None:
    """Send valid and invalid data, the same every time.

    The phase "coverage" goes through each schema systematically, "fuzzing" tries random data.
    """
    python = packages.environment("schemathesis", REQUIREMENT)
    options = ["--checks", "not_a_server_error", "--mode", "all", "--max-examples", "25"]
    options += ["--generation-deterministic", "--suppress-health-check", "all", "--continue-on-failure", "--no-shrink"]
    options += ["--request-timeout", "60", "--no-color", "--output-sanitize", "false", "--output-truncate", "false"]
    options += ["-H", f"Authorization: Bearer {key}", *arguments]
    command: list[str | Path] = [python.with_name("schemathesis"), "run", f"{server.base_url}/openapi.json", *options]
    run = run_command(command, folder=folder, timeout=1200)
    assert run.returncode == 0, run.stdout
