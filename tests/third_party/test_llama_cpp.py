"""The tests of llama.cpp's server about completions, tokens, templates, keys, tools, embeddings, Responses, and
Anthropic's API."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.endpoints.running import running_server
from tests.minilm import MINILM
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script
from tests.serving import ServerProcess, served
from tests.third_party.suites import AllowList, PackageCache, Results, call, run_pytest, set_defaults

PACKAGE = "llama-cpp-python==0.3.36"
TESTS = Path("vendor", "llama.cpp", "tools", "server", "tests")
ALLOWED = Path(__file__).with_name("llama_cpp.toml")
TEMPLATE = Path(__file__).parents[1] / "common" / "chat_templates" / "qwen3.jinja"  # as they set it for thoughts
KEY = "sk-this-is-the-secret-key"  # TEST_API_KEY in test_security.py
# As their preset tinyllama2 has it: 512 tokens in two slots.
PRESET = ("--max-seq-len", "256", "--cache-size", "512", "--max-batch-size", "2")
MEDIA_FILES = "unit/test_security.py::test_local_media_file"  # sends no key
WITHOUT_KEY = (
    *(
        f"unit/test_{name}.py"
        for name in ("chat_completion", "compat_oai_responses", "completion", "tokenize", "template")
    ),
    MEDIA_FILES,
)
MESSAGES = ("unit/test_compat_anthropic.py",)
MESSAGES_PRESET = ("--max-seq-len", "8192", "--cache-size", "8192")
EMBEDDINGS = ("unit/test_embedding.py", "unit/test_rerank.py")
# Their model answers to every name; they ask for OpenAI's.
EMBEDDINGS_PRESET = ("--use-dummy-models", "true", "--dummy-model-names", "text-embedding-3-small")
WITH_KEY = ("unit/test_security.py", "--deselect", MEDIA_FILES)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RunSuite = Callable[[str, Sequence[str]], Results]  # server's address, arguments of pytest


@pytest.fixture
def run(packages: PackageCache, tmp_path: Path) -> RunSuite:
    folder = packages.sdist(PACKAGE, packages.environment("scikit-build", "scikit-build-core")) / TESTS
    python = packages.environment("llama-cpp", folder / "requirements.txt")

    def run(address: str, selection: Sequence[str]) -> Results:
        return run_pytest(
            python,
            folder,
            *selection,
            report=tmp_path / "report.xml",
            timeout=1200,
            variables={"DEBUG_EXTERNAL": "1", "PORT": address.rpartition(":")[2]},
        )

    return run


def test_suite(run: RunSuite, tiny_llama: Path, tmp_path: Path) -> None:
    def with_defaults(server: ServerProcess, selection: tuple[str, ...]) -> Results:
        set_defaults(server, max_tokens=16, temperature=0.8, seed=42)  # as theirs, which goes on for 64 tokens
        return run(server.base_url, ("-m", "not slow", *selection))

    with served(tmp_path, *PRESET, "--disable-auth", "true", model=tiny_llama) as server:
        results = with_defaults(server, WITHOUT_KEY)
    with served(tmp_path, *PRESET, model=tiny_llama, api_key=KEY) as server:
        results |= with_defaults(server, WITH_KEY)
    thinking = Path(shutil.copytree(tiny_llama, tmp_path / "models" / "tiny-llama"))
    shutil.copy(TEMPLATE, thinking / "chat_template.jinja")
    with served(tmp_path, *MESSAGES_PRESET, "--disable-auth", "true", model=thinking) as server:
        results |= with_defaults(server, MESSAGES)
    arguments = ("--disable-auth", "true", "--embedding-model-dir", str(MINILM.parent), *EMBEDDINGS_PRESET)
    with served(tmp_path, *arguments) as server, server.client(server.admin_key) as admin:
        admin.post("/v1/model/embedding/load", json={"embedding_model_name": MINILM.name}).raise_for_status()
        results |= run(server.base_url, ("-m", "not slow", *EMBEDDINGS))
    AllowList.read(ALLOWED).judge(results)


# --- tools ------------------------------------------------------------------------------------------------------------

# The tests of larger models, the same again for each of them. What such a model says to their prompts is played by a
# scripted engine; the calls that the grammar forces come from the demo model.
PLAYS = {
    "weather in Istanbul": call("get_current_weather", location="Istanbul, Turkey"),
    "hello world": call("python", code='print("Hello, World!")'),
    "unit sphere": "The y coordinate is **0.5**",
}
PLAYED = "test_weather or test_hello_world or test_calc_result or test_completion_without_tool_call"
FORCED = "test_completion_with_required_tool_real_model and Qwen2.5-1.5B and success"
# Their client refuses a first chunk whose content is an empty string, as OpenAI's is.
NOT_STREAMED = "not STREAMED"


def test_calls_of_larger_models(run: RunSuite, tmp_path: Path) -> None:
    engine = ScriptedEngine(tmp_path)
    engine.add_model("model")
    engine.write(Script(plays=[Play(when=when, chunks=[text]) for when, text in PLAYS.items()]))
    with running_server(engine, auth=False).running() as server:
        server.load("model", tool_format="hermes")
        results = run(server.base_url, ("-k", f"({PLAYED}) and {NOT_STREAMED}", "unit/test_tool_call.py"))
    AllowList().judge(results)
    assert len(results) > 50


def test_forced_calls(run: RunSuite, smollm2: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--disable-auth", "true", model=smollm2) as server:
        results = run(server.base_url, ("-k", f"({FORCED}) and {NOT_STREAMED}", "unit/test_tool_call.py"))
    AllowList().judge(results)
    assert results
