"""The pages for users say what is true: what they name exists, and their examples work."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from ruamel.yaml import YAML

import start
from backends.embeddings.worker import EXTRA_IS_MISSING
from backends.exllamav3.checkpoints import DEFAULT_INTERVAL, DEFAULT_INTERVAL_PP, plan
from common.auth import KEY_BYTES, KeyStore
from common.config_models import Settings
from common.downloader import MAX_RUNNING, STAGING_PREFIX
from common.errors import (
    Conflict,
    DiskFull,
    DownloadFailed,
    HostNotAllowed,
    InvalidRequest,
    NotFound,
    OriginNotAllowed,
)
from common.fetch import FETCH_SECONDS
from common.grammar import MOST_CHARACTERS, check_constraint
from common.guarded_get import MAX_REDIRECTS, PUBLIC_PORTS
from common.image_urls import MAX_IMAGE_BYTES, MAX_REQUEST_BYTES
from common.images import MAX_PIXELS
from common.json_schema import WHITESPACE
from common.limits import MAX_ANSWERS, MAX_EMBEDDED, MAX_IMAGES, MAX_PROMPTS, MAX_RANKED, MAX_TOP_LOGPROBS
from common.metrics import Metrics
from common.parsing.detection import tool_format_names
from common.prefixes import MAX_TURNS
from common.sampling import SamplerPresets
from common.settings_catalog import ALL_SETTINGS, CATALOG, SECTIONS, unknown_keys
from common.templating import ChatTemplate, find_template
from endpoints.core.types.download import DownloadBody, DownloadEvent
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.types.common import GenerationFields
from endpoints.OAI.types.embedding import EmbeddingRequest, RerankRequest, RerankResponse
from endpoints.OAI.utils.constraints import FORMATS, requested_constraints
from endpoints.protocol import MAX_HEADER_BYTES
from endpoints.server import create_app, route_table
from tests.endpoints.running import CHATML, RunningServer
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

ROOT = Path(start.__file__).parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
USAGE = ROOT / "docs" / "03.-Usage.md"
CHAT = ROOT / "docs" / "04.-Chat-Completions.md"
TOOLS = ROOT / "docs" / "10.-Tool-Calling.md"
REASONING = ROOT / "docs" / "11.-Reasoning.md"
CACHING = ROOT / "docs" / "12.-Prompt-Caching.md"
OTHER_APIS = ROOT / "docs" / "16.-Other-APIs.md"
DOWNLOADING = ROOT / "docs" / "21.-Downloading.md"
MONITORING = ROOT / "docs" / "13.-Monitoring.md"
SECURITY = ROOT / "docs" / "15.-Security.md"
EMBEDDINGS = ROOT / "docs" / "18.-Embeddings.md"
IMAGES = ROOT / "docs" / "19.-Images.md"
MOVING = ROOT / "docs" / "Coming-from-TabbyAPI.md"
GETTING_STARTED = ROOT / "docs" / "01.-Getting-Started.md"

# Made when the server runs, or by its user.
NOT_IN_THE_TREE = {
    *("config.yml", "config.yml.bak", "other.yml", "api_tokens.yml", "openapi.json", ".venv/installation.json"),
    *("tabby_config.yml", "tabby_template.jinja", "models/", "loras/", "logs/"),
    *("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tokenizer.json", "config.json"),
    *("adapter_config.json", "modules.json"),
    "additional_chat_templates/",
    "/openapi.json",  # a route
}
MADE_BY_USE = {"models", "loras", "logs"}
OPTIONS_OF_OTHER_PROGRAMS = {"--local-dir", "--model", "--cache-clear"}
OLD_LAYOUT = {"model.draft", "model.lora"}
BASE_URL = "http://127.0.0.1:5000"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def code(text: str) -> list[str]:
    """Fenced blocks and inline code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [*fenced, *inline]


def section(page: Path, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text_of(page), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def anchors(page: Path) -> set[str]:
    """As code hosts make them from headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_files_exist(page: Path) -> None:
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".") and top.name not in MADE_BY_USE]
    paths = [path for top in tops for path in [top, *top.rglob("*")]]
    tree = {f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}" for path in paths}
    for name in code(text_of(page)):
        if not re.fullmatch(r"[\w./-]+(\.(py|yml|md|txt|sh|bat|jinja|toml|json)|/)", name) or name in NOT_IN_THE_TREE:
            continue
        assert any(known.endswith("/" + name.removeprefix("./")) for known in tree), name


@each_page
def test_command_line_options_exist(page: Path) -> None:
    known = {setting.option for setting in ALL_SETTINGS} | {"--config", "--help"} | OPTIONS_OF_OTHER_PROGRAMS
    programs = [path for folder in ("tools", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    for source in [ROOT / "start.py", *programs, *(ROOT / "common").glob("args.py")]:
        known.update(re.findall(r'"(--[a-z][a-z0-9-]+)"', source.read_text(encoding="utf-8")))
    known.update(re.findall(r"--[a-z][a-z0-9-]+", (ROOT / "scripts" / "test").read_text(encoding="utf-8")))
    named = {option for piece in code(text_of(page)) for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", piece)}
    assert named - known == set()


@each_page
def test_settings_exist(page: Path) -> None:
    names = {setting.name for setting in ALL_SETTINGS} | OLD_LAYOUT
    variables = {setting.variable for setting in ALL_SETTINGS} | {"TABBY_LOG_LEVEL", "TABBY_SECTION_KEY"}
    for piece in code(text_of(page)):
        if re.fullmatch(rf"({'|'.join(CATALOG)})\.(?!py$)\w+", piece):
            assert piece in names
        assert set(re.findall(r"TABBY_[A-Z_]+", piece)) <= variables


@each_page
def test_yaml_can_be_used(page: Path) -> None:
    for block in blocks(page, "yaml"):
        content = YAML(typ="safe", pure=True).load(block)
        if content.keys() <= CATALOG.keys():
            for name, values in content.items():
                assert list(unknown_keys(name, values, CATALOG[name], page.name)) == []
                SECTIONS[name].model_validate(values)
        else:
            presets = SamplerPresets()
            presets.replace(content)
            assert presets.overrides.keys() == content.keys()


@each_page
def test_tables_of_edit_costs_are_the_plans(page: Path) -> None:
    """What the engine does is compared with the plan elsewhere."""
    table = re.search(
        r"^\| `chunk_size`, [^|]*\|[^|]*\|(.* @.*)\|\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE
    )
    if table is None:
        assert page not in (README, CACHING)
        return
    positions = [int(cell.strip(" @").replace(",", "")) for cell in table[1].split("|")]
    for row in table[2].splitlines():
        settings, _, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        chunk_size, interval_pp, interval = settings.split(", ")
        computed = plan(
            5266,
            int(chunk_size),
            DEFAULT_INTERVAL if interval == "default" else int(interval),
            DEFAULT_INTERVAL_PP if interval_pp in ("default", "any") else int(interval_pp),
            checkpoint_bytes=1,
            budget_bytes=5266,
        )
        assert [int(cell) for cell in cells] == [computed.replay(position) for position in positions], row


# --- routes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    manager = ScriptedEngine(tmp_path_factory.mktemp("routes")).manager()
    return {_without_names(row.path) for row in route_table(create_app(Settings(), manager, None))}


def _without_names(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def named_routes(text: str) -> set[str]:
    found = re.findall(
        r"(?<![\w.])(?:http://[\w.:]+)?"
        r"(/(?:v1/|api/|health|ready|props|ping|version|tokenize|detokenize|apply-template|completion|infill)[\w/{}]*)",
        "\n".join(code(text)),
    )
    return {_without_names(path) for path in found}


@each_page
def test_routes_exist(page: Path, routes: set[str]) -> None:
    assert named_routes(text_of(page)) <= routes


# --- chats and answers --------------------------------------------------------------------------------------------


def rows(heading: str, start: str = "") -> list[list[str]]:
    """The cells of the rows below a heading of the page on chat completions that begin so."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text_of(CHAT), re.DOTALL | re.MULTILINE)
    assert found is not None
    lines = [line for line in found[1].splitlines() if line.startswith("| " + start)]
    assert lines, start
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@each_page
def test_metrics_exist(page: Path) -> None:
    names = {family.name for family in Metrics().families}
    histograms = {family.name for family in Metrics().families if family.type == "histogram"}
    names |= {f"{name}_{series}" for name in histograms for series in ("bucket", "sum", "count")}
    assert set(re.findall(r"\bwaypoint_\w+", text_of(page))) - names == set()


def test_lines_of_the_log_are_as_shown() -> None:
    source = (ROOT / "endpoints" / "answer_record.py").read_text(encoding="utf-8")
    logged = re.sub(r'"\n\s+"', "", source)
    lines = blocks(MONITORING, "text")
    assert len(lines) == 2
    for line in lines:
        shape = re.sub(r"\((stop_token|cancelled)\)", "({})", line.strip())
        shape = re.sub(r"\d+\.\d\d|\d+", lambda number: "{:.2f}" if "." in number[0] else "{}", shape)
        assert shape in logged


def test_bundled_templates_are_as_shown() -> None:
    for name, prompt, stop_strings in rows("Which one is used", "`"):
        template = find_template(ROOT / "none", name.strip("`"))
        assert template is not None
        rendering = template.render([{"role": "user", "content": "Hi"}])
        assert json.loads(prompt.strip("`")) == rendering.text
        assert stop_strings.split(", ") == [f"`{string}`" for string in rendering.stop_strings]


@each_page
def test_templates_compile(page: Path) -> None:
    for block in blocks(page, "jinja"):
        text, stop_strings = ChatTemplate("example", block).render([{"role": "user", "content": "Hi"}])
        assert text.endswith("User: Hi\nAssistant:")
        assert stop_strings == ["\nUser:"]


@each_page
def test_json_is_json(page: Path) -> None:
    for block in blocks(page, "json"):
        json.loads(block)


def test_every_form_of_constraint_asks_for_one() -> None:
    fields = [cells[0] for cells in rows("Constrained output", "`{")]
    given = [json.loads(body) for bodies in fields for body in re.findall("`([^`]+)`", bodies)]
    formats = {body["response_format"]["type"] for body in given if "response_format" in body}
    assert formats == set(FORMATS)
    for body in given:
        constraints = list(requested_constraints(GenerationFields.model_validate(body)))
        assert len(constraints) == (body.get("response_format") != {"type": "text"}), body
        for constraint in constraints:
            check_constraint(constraint)


def test_requests_about_thoughts_are_understood() -> None:
    """Those shown in tables, as the fields that they stand for."""
    shown = [json.loads(body) for body in re.findall(r"`(\{\"[^`]+)`", text_of(REASONING))]
    asked = [ChatCompletionRequest.model_validate({"messages": [{"content": "Hi"}], **body}) for body in shown]
    plain = ChatCompletionRequest.model_validate({"messages": [{"content": "Hi"}]})
    assert len(asked) > 10
    for body, request in zip(shown, asked, strict=True):
        meaning = ("shows_thoughts", "thoughts_in_content", "thinks", "effort", "reasoning_budget", "include_reasoning")
        assert any(getattr(request, name) != getattr(plain, name) for name in meaning), body


def test_the_page_on_downloads_says_what_can_be_asked_for() -> None:
    text = text_of(DOWNLOADING)
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section(DOWNLOADING, "The route"), re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(fields))) == DownloadBody.model_fields.keys()
    assert MAX_RUNNING == 4
    assert f"`{STAGING_PREFIX}NAME`" in text
    (event,) = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert json.loads(event).keys() == DownloadEvent.model_fields.keys()
    codes = {(str(leaf.status), leaf.code) for leaf in (InvalidRequest, NotFound, Conflict, DownloadFailed, DiskFull)}
    assert codes <= set(re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE))


def test_the_page_on_embeddings_says_what_can_be_asked_for() -> None:
    for heading, fields in (("Embeddings", EmbeddingRequest), ("Reranking", RerankRequest)):
        named = re.findall(r"^\| `(\w+)` \|", section(EMBEDDINGS, heading), re.MULTILINE)
        assert set(named) == fields.model_fields.keys()
    (answer,) = blocks(EMBEDDINGS, "json")
    RerankResponse.model_validate_json(answer, strict=True)
    assert f"list of texts, {MAX_EMBEDDED:,} at most" in text_of(EMBEDDINGS)
    assert f"with a `text`; {MAX_RANKED:,} at most" in text_of(EMBEDDINGS)
    (extra,) = start.declared_requirements(["embeddings"])[len(start.declared_requirements([])) :]
    assert f'pip install "{extra}"' in text_of(EMBEDDINGS)
    assert f'pip install "{extra}"' in EXTRA_IS_MISSING


def test_every_tool_format_is_listed() -> None:
    text = text_of(TOOLS)
    assert [name for name in tool_format_names() if f"`{name}`" not in text] == []


def test_numbers_of_the_page_on_chat_are_those_in_force() -> None:
    text = text_of(CHAT)
    assert f"{MOST_CHARACTERS:,} characters" in text
    assert f"at most {re.findall(r',([0-9]+)', WHITESPACE)[0]} spaces" in text
    assert f"The last {MAX_TURNS} turns" in text
    assert f"up to {MAX_ANSWERS} answers" in text
    assert f"up to {MAX_PROMPTS} prompts" in text
    assert f"`top_logprobs` (0 to {MAX_TOP_LOGPROBS})" in text


def test_numbers_of_the_page_on_images_are_those_in_force() -> None:
    text = text_of(IMAGES)
    assert f"| images of a request | {MAX_IMAGES} |" in text
    assert f"{MAX_IMAGE_BYTES // 1024**2} MB, {MAX_PIXELS // 1_000_000} million pixels" in text
    assert f"all images of a request | {MAX_REQUEST_BYTES // 1024**2} MB" in text
    assert f"in {FETCH_SECONDS:.0f} seconds" in text
    assert f"ports {' and '.join(map(str, PUBLIC_PORTS))}" in text


def test_reasons_for_processing_again_exist() -> None:
    source = (ROOT / "common" / "prefixes.py").read_text(encoding="utf-8")
    quoted = [reason for cells in rows("Prompts that begin alike", '"') for reason in re.findall('"([^"]+)"', cells[0])]
    pieces = [piece.strip() for reason in quoted for piece in re.split(r"…|\bN\b|^tools ", reason)]
    assert len(quoted) > 8
    assert [piece for piece in pieces if piece not in source] == []


def test_what_the_page_on_security_says_is_in_force() -> None:
    text = text_of(SECURITY)
    assert f"{MAX_HEADER_BYTES // 1024} KB of headers" in text
    assert f"ports {' and '.join(map(str, PUBLIC_PORTS))}" in text
    assert f"{KEY_BYTES * 8} random" in text
    assert {3: "three"}[MAX_REDIRECTS] in text
    assert all(f"`{code}`" in text for code in (HostNotAllowed.code, OriginNotAllowed.code))
    app = create_app(Settings(), ScriptedEngine(ROOT).manager(), None)
    open_routes = {row.path for row in route_table(app) if row.level == "none"}
    assert all(f"`{path}`" in section(SECURITY, "Keys") for path in open_routes)


# --- messages and examples ----------------------------------------------------------------------------------------


def test_messages_in_the_list_of_troubles_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for folder in ("common", "backends") for path in _python(folder))
    source += "".join((ROOT / name).read_text(encoding="utf-8") for name in ("start.py", "endpoints/server.py"))
    source += (ROOT / "endpoints" / "routing.py").read_text(encoding="utf-8")
    quoted = re.findall(r'^\| "([^"]+)"', section(GETTING_STARTED, "When something goes wrong"), re.MULTILINE)
    assert len(quoted) > 5
    assert [message for message in quoted if message not in source] == []


def _python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the model NAME, and keys as it makes them itself, in `engine.root`."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("examples"))
    (engine.add_model("NAME") / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    engine.write(Script())
    (engine.root / "presets").mkdir()
    shutil.copy(ROOT / "sampler_overrides" / "safe_defaults.yml", engine.root / "presets")
    keys = KeyStore.open(engine.root / "api_tokens.yml", io.StringIO())
    settings = Settings.model_validate({"network": {"port": 0}, "model": {"model_dir": str(engine.model_dir)}})
    with RunningServer(engine, settings, keys).running() as running:
        yield running


@pytest.fixture
def example_variables(example_server: RunningServer) -> Mapping[str, str]:
    """The keys, as variables of the shell; the model is loaded."""
    keys = YAML(typ="safe", pure=True).load(example_server.engine.root / "api_tokens.yml")
    load = httpx.post(
        f"{example_server.base_url}/v1/model/load",
        json={"model_name": "NAME"},
        headers={"x-admin-key": keys["admin_key"]},
    )
    assert '"finished"' in load.text
    return {"API_KEY": keys["api_key"], "ADMIN_KEY": keys["admin_key"]}


def run_shell(script: str, server: RunningServer, variables: Mapping[str, str] | None = None) -> str:
    """Run an example in the folder of the key file; a response that is an error fails."""
    if shutil.which("curl") is None or os.name == "nt":
        pytest.skip("needs curl and a POSIX shell")
    prelude = 'set -eu\ncurl() { command curl --silent --show-error --fail-with-body "$@"; echo; }\n'
    done = subprocess.run(
        ["bash", "-c", prelude + script.replace(BASE_URL, server.base_url)],
        cwd=server.engine.root,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"error"' not in done.stdout  # also inside a stream
    return done.stdout


@pytest.mark.usefixtures("example_variables")
def test_first_request_with_curl(example_server: RunningServer) -> None:
    (example,) = (block for block in blocks(README, "sh") if "curl" in block)
    assert '"chat.completion"' in run_shell(example, example_server)


def test_first_request_with_the_openai_client(
    example_server: RunningServer, example_variables: Mapping[str, str]
) -> None:
    (example,) = blocks(README, "python")
    done = subprocess.run(
        [sys.executable, "-c", example.replace(BASE_URL, example_server.base_url)],
        env={**os.environ, **example_variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hello world\n"


def examples(page: Path) -> list[str]:
    return [block for block in blocks(page, "sh") if "curl" in block]


@pytest.mark.parametrize(
    ("page", "number"),
    [
        (page, number)
        for page in (USAGE, CHAT, TOOLS, REASONING, CACHING, OTHER_APIS)
        for number in range(len(examples(page)))
    ],
)
def test_examples(page: Path, number: int, example_server: RunningServer, example_variables: Mapping[str, str]) -> None:
    assert run_shell(examples(page)[number], example_server, example_variables).strip()


def test_usage_reads_both_keys(example_server: RunningServer, example_variables: Mapping[str, str]) -> None:
    example = blocks(USAGE, "sh")[0]
    shown = run_shell(example + 'echo "$API_KEY $ADMIN_KEY"', example_server).split()
    assert shown == [example_variables["API_KEY"], example_variables["ADMIN_KEY"]]
