"""vLLM's own tests of its HTTP interface: chat completions, completions, tokenization."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.serving import served
from tests.third_party.suites import AllowList, PackageCache, run_pytest, set_defaults

PACKAGE = "vllm==0.33.0"
ALLOWED = Path(__file__).with_name("vllm.toml")
STANDINS = Path(__file__).parent / "vllm" / "standins"
REQUIREMENTS = (
    # to read the source's metadata
    "jinja2",
    "packaging",
    "setuptools>=77.0.3,<81",
    "setuptools-rust",
    "setuptools-scm",
    "wheel",
    # to run its tests
    "anthropic>=2.14,<3",
    "jsonschema",
    "openai>=3.57,<4",
    "pybase64",
    "pytest>=9.2,<10",
    "pytest-asyncio>=1.5,<2",
    "pytest-timeout>=2.4,<3",
    "regex",
    "requests",
    "transformers>=5.24,<6",
)
# Their other files test vLLM's classes without a server, or what later issues bring: images, prompt embeddings.
# Those about tools and thoughts that need a model which has them are in test_vllm_tools.py.
FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/tokenize/test_tokenization.py",
)

SERVER_OPTIONS = ("--disable-auth", "true", "--max-seq-len", "8192")  # max_model_len is asserted
PYTEST_OPTIONS = (
    *("-p", "vllm_standins"),
    # The same requests again to a LoRA and with a watermark, and answers of up to 1,000 tokens.
    *("-k", "not lora and not watermarked and not test_structured_outputs_json_chat and not test_named_tool_use"),
    *("-o", "asyncio_default_fixture_loop_scope=function", "--timeout", "180"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_entrypoints(packages: PackageCache, smollm2: Path, tmp_path: Path) -> None:
    python, suite = unpack(packages, tmp_path / "suite")
    with served(tmp_path, *SERVER_OPTIONS, model=smollm2) as server:
        # Many requests set no limit, and on a CPU the model's own end may be far.
        set_defaults(server, max_tokens=48, seed=42)
        results = run_pytest(
            python,
            suite,
            *PYTEST_OPTIONS,
            *(f"tests/entrypoints/{file}" for file in FILES),
            report=tmp_path / "report.xml",
            timeout=1200,
            variables={
                "PYTHONPATH": str(STANDINS),
                "SUITE_MODEL": str(smollm2),
                "SUITE_SERVERS": json.dumps({"*": server.base_url}),
            },
        )
    AllowList.read(ALLOWED).judge(results)


def unpack(packages: PackageCache, folder: Path) -> tuple[Path, Path]:
    """Python of the suite's environment, and a folder with its tests but without what needs vLLM itself: their
    conftest.py and most of their utils.py."""
    python = packages.environment("vllm", *REQUIREMENTS)
    # Without the second variable pip takes the version for another and goes on to older releases.
    build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": PACKAGE.partition("==")[2]}
    source = packages.sdist(PACKAGE, python, {**build, "PYTHONPATH": str(STANDINS)})
    for name in ("entrypoints", "tool_use"):
        shutil.copytree(source / "tests" / name, folder / "tests" / name)
    (folder / "tests" / "__init__.py").touch()
    shutil.copy(STANDINS / "remote_server.py", folder / "tests" / "utils.py")
    return python, folder
