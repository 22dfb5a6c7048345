"""The tests of llama.cpp's server about completions, tokens, templates and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import ServerProcess, served
from tests.third_party.suites import AllowList, PackageCache, Results, run_pytest, set_defaults

PACKAGE = "llama-cpp-python==0.3.36"
TESTS = Path("vendor", "llama.cpp", "tools", "server", "tests")
ALLOWED = Path(__file__).with_name("llama_cpp.toml")
KEY = "sk-this-is-the-secret-key"  # TEST_API_KEY in test_security.py
# As their preset tinyllama2 has it: 512 tokens in two slots.
PRESET = ("--max-seq-len", "256", "--cache-size", "512", "--max-batch-size", "2")
MEDIA_FILES = "unit/test_security.py::test_local_media_file"  # sends no key
WITHOUT_KEY = (
    *(f"unit/test_{name}.py" for name in ("chat_completion", "completion", "tokenize", "template")),
    MEDIA_FILES,
)
WITH_KEY = ("unit/test_security.py", "--deselect", MEDIA_FILES)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_suite(packages: PackageCache, tiny_llama: Path, tmp_path: Path) -> None:
    folder = packages.sdist(PACKAGE, packages.environment("scikit-build", "scikit-build-core")) / TESTS
    python = packages.environment("llama-cpp", folder / "requirements.txt")

    def run(server: ServerProcess, selection: tuple[str, ...]) -> Results:
        set_defaults(server, max_tokens=16, temperature=0.8, seed=42)  # as theirs, which goes on for 64 tokens
        return run_pytest(
            python,
            folder,
            *("-m", "not slow", *selection),
            report=tmp_path / "report.xml",
            timeout=1200,
            variables={"DEBUG_EXTERNAL": "1", "PORT": server.base_url.rpartition(":")[2]},
        )

    with served(tmp_path, *PRESET, "--disable-auth", "true", model=tiny_llama) as server:
        results = run(server, WITHOUT_KEY)
    with served(tmp_path, *PRESET, model=tiny_llama, api_key=KEY) as server:
        results |= run(server, WITH_KEY)
    AllowList.read(ALLOWED).judge(results)
