"""Names in requests lead to nothing but what lies in their folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from common.names import is_plain_name
from tests.common.test_names import HOSTILE_NAMES
from tests.endpoints.running import RunningServer

ROOT = Path(__file__).parents[3]
# Escaped a second time, which nobody undoes, they are plain names that nothing has.
ENCODED = ["%2e%2e%2falpha", "..%2falpha", "%2fetc%2fpasswd", "%252e%252e%252falpha", "..%5calpha", "alpha%00"]
ENCODED += ["x" * 5000]

Ask = Callable[[RunningServer, str], httpx.Response]


def load(**fields: Any) -> Ask:
    """A load of "beta", or of another model, in which one field has the name."""

    def ask(server: RunningServer, name: str) -> httpx.Response:
        body = {key: name if value is None else value for key, value in fields.items()}
        return server.admin.post("/v1/model/load", json={"model_name": "beta", **body})

    return ask


def draft(**fields: Any) -> Ask:
    def ask(server: RunningServer, name: str) -> httpx.Response:
        body = {key: name if value is None else value for key, value in fields.items()}
        return server.admin.post("/v1/model/load", json={"model_name": "beta", "draft_model": body})

    return ask


def post(path: str, field: str) -> Ask:
    return lambda server, name: server.admin.post(path, json={field: name})


FIELDS: dict[str, tuple[Ask, set[int]]] = {
    "model_name": (load(model_name=None), {400, 404}),
    "prompt_template": (load(prompt_template=None), {400}),
    "sampler_preset": (load(sampler_preset=None), {404}),
    "tool_format": (load(tool_format=None), {400}),
    "ngram_corpus": (draft(draft_mode="ngram", ngram_corpus=None), {400}),
    "template": (post("/v1/template/switch", "prompt_template_name"), {400}),
    "preset": (post("/v1/sampling/override/switch", "preset"), {400, 404}),
    "plan": (lambda server, name: server.admin.get("/v1/cache/plan", params={"model": name}), {400, 404}),
    "model": (lambda server, name: server.admin.get(f"/v1/models/{quote(name, safe='')}"), {404}),
}


@pytest.fixture(scope="module", autouse=True)
def _bait(server: RunningServer) -> None:
    """What lies next to the folders, and must not be found: a model, a preset, a template, a corpus."""
    for folder in (server.engine.root, server.engine.root / "x"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        (folder / "x.yml").write_text("temperature: {override: 2, force: true}", encoding="utf-8")


@pytest.mark.parametrize("field", FIELDS)
def test_hostile_names(server: RunningServer, field: str) -> None:
    ask, statuses = FIELDS[field]
    for name in [*HOSTILE_NAMES, *ENCODED]:
        name = name.encode("utf-8", "replace").decode()  # what JSON brings in, see `JsonRequest`
        if not name or (field == "ngram_corpus" and is_plain_name(name)) or (field == "model" and name in (".", "..")):
            continue  # no name; a file in the folder, which the engine would miss; what an HTTP client takes out
        response = ask(server, name)
        assert response.status_code in statuses, (name, response.text)
        error = response.json()["error"]
        assert error["code"] in ("invalid_request", "not_found", "model_not_found"), (name, error)
        for place in (ROOT, server.engine.root.resolve()):
            assert str(place) not in response.text
    assert server.http.get("/v1/model").json()["id"] == "alpha"  # nothing was loaded or switched


def test_a_load_request_sets_nothing_of_the_server(server: RunningServer) -> None:
    """Where it keeps its files, and where it looks for drafters, is up to whoever writes config.yml."""
    body = {
        "memory": {"disk_cache_dir": "/tmp/x"},
        "disk_cache_dir": "/tmp/x",
        "model_dir": "/",
        "draft_model_dir": "/",
    }
    response = server.admin.post("/v1/model/load", json={"model_name": "beta", "draft_model": body, **body})
    assert '"finished"' in response.text
    client = server.manager.current
    assert client is not None
    assert client.settings.memory.disk_cache_dir is None
    assert client.settings.draft_model.draft_model_dir == str(Path("models").absolute())
    server.load("alpha")
