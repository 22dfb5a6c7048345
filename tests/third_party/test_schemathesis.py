"""schemathesis: data made from our openapi.json, valid and invalid, never gets a server error, and always an answer of
the kind that the document promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import HubStandIn
from tests.minilm import MINILM
from tests.serving import ServerProcess, served
from tests.third_party.suites import PackageCache, run_command, set_defaults

REQUIREMENT = "schemathesis==4.32.5"
# Left out is `positive_data_acceptance`: a schema cannot say how fields depend on each other, nor what a model can do.
# The phase "stateful" is, too: the document links no route to another.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "ignored_auth",
    "unsupported_method",
    "allow_header_conformance",
)
GENERATION = (
    r"/v1/.*completions$|/messages$|/responses$|/completion$|/infill$"
    r"|^/api/(v1/|extra/)?generate(/stream)?$|^/api/chat$"
)
# After an unload there is no model, and 503 is the right answer to all that follows; the events of models have no end;
# /api/latest is /api/v1 once more.
LEFT_OUT = r"/model/(embedding/)?unload$|/model/events$|^/api/latest/"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, running_hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """With a model that has a BOS token, and so takes the empty prompts that are sent most; an embedding model; and a
    hub that has nothing."""
    folder = tmp_path_factory.mktemp("server")
    options = ("--max-seq-len", "256", "--embedding-model-dir", str(MINILM.parent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", running_hub.url)
        patch.setenv("HF_HOME", str(folder / "huggingface"))
        with served(folder, *options, model=tiny_llama) as server:
            with server.client(server.admin_key) as admin:
                body = {"embedding_model_name": MINILM.name}
                admin.post("/v1/model/embedding/load", json=body).raise_for_status()
            yield server


# The systematic one asks that every null, and every false for a number, be refused; we take them.
@pytest.mark.parametrize("phase", [("coverage", "--exclude-checks", "negative_data_rejection"), ("fuzzing",)])
def test_generation(packages: PackageCache, server: ServerProcess, tmp_path: Path, phase: tuple[str, ...]) -> None:
    set_defaults(server, force=True, max_tokens=2)  # whatever a request says: its fields matter here, not the text
    fuzz(packages, server, server.api_key, tmp_path, "--include-path-regex", GENERATION, "--phases", *phase)


@pytest.mark.parametrize("who", ["administrator", "client"])
def test_everything_else(packages: PackageCache, server: ServerProcess, tmp_path: Path, who: str) -> None:
    key = server.admin_key if who == "administrator" else server.api_key
    arguments = ["--exclude-path-regex", f"{GENERATION}|{LEFT_OUT}", "--phases", "fuzzing"]
    fuzz(packages, server, key, tmp_path, *arguments)


def test_strangers(packages: PackageCache, server: ServerProcess, tmp_path: Path) -> None:
    """Without a key, on every route."""
    fuzz(packages, server, None, tmp_path, "--phases", "fuzzing")


def fuzz(packages: PackageCache, server: ServerProcess, key: str | None, folder: Path, *arguments: str) -> None:
    """Send valid and invalid data, the same every time.

    The phase "coverage" goes through each schema systematically, "fuzzing" tries random data.

    Args:
        key: None sends none.
        arguments: which routes and phases.
    """
    document = folder / "openapi.json"
    with server.client(server.admin_key) as client:
        document.write_bytes(client.get("/openapi.json").raise_for_status().content)
    python = packages.environment("schemathesis", REQUIREMENT)
    options = ["--url", server.base_url, "--checks", ",".join(CHECKS), "--mode", "all", "--max-examples", "25"]
    options += ["--generation-deterministic", "--suppress-health-check", "all", "--continue-on-failure", "--no-shrink"]
    options += ["--request-timeout", "60", "--no-color", "--output-sanitize", "false", "--output-truncate", "false"]
    if key is not None:
        options += ["-H", f"Authorization: Bearer {key}"]
    command: list[str | Path] = [python.with_name("schemathesis"), "run", document, *options, *arguments]
    run = run_command(command, folder=folder, timeout=1200)
    assert run.returncode == 0, run.stdout
