"""Keys and tokens, wherever a request may hold them, reach neither the terminal nor a file nor another client."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.config_models import Settings
from endpoints.request_log import redact_headers, redact_members
from endpoints.routing import route_table
from endpoints.server import create_app
from tests.scripted import ScriptedEngine
from tests.serving import ADMIN_KEY, ServerProcess, served

API_KEY = "s3cret-valid-api-key"
WRONG_KEY = "s3cret-wrong-key"
MARK = "s3cret-mark"
EVERYTHING = ("--log-requests", "--log-prompt", "--log-generation-params", "--log-chat-completion-requests")

HEADERS = {
    "Cookie": f"session={MARK}",
    "Proxy-Authorization": f"Basic {MARK}",
    "Referer": f"http://localhost/?api_key={MARK}",
    "X-Original-URL": f"/v1/models?token={MARK}",
    "X-Goog-Api-Key": MARK,
    "X-CSRF-Token": MARK,
    "X-Client-Secret": MARK,
}
QUERY = {"api_key": MARK, "key": "shown", "access_token": MARK, "token": MARK}
SECRETS = {
    "api_key": MARK,
    "apiKey": MARK,
    "admin_key": MARK,
    "Authorization": MARK,
    "hf_token": MARK,
    "token": MARK,
    "access_token": MARK,
    "password": MARK,
    "client_secret": MARK,
}
BODIES = {
    "objects": json.dumps(
        {"messages": [{"content": "hi", "metadata": {"deep": [SECRETS]}}], "model_name": "none", **SECRETS}
    ).encode(),
    "broken JSON": json.dumps(SECRETS).encode()[:-1],
    "form": f"api_key={MARK}&token={MARK}".encode(),
}
KEYS = [
    {"Authorization": f"Bearer {API_KEY}"},
    {"x-api-key": WRONG_KEY, "x-admin-key": ADMIN_KEY},
    {"Authorization": f"Bearer {WRONG_KEY}", "x-api-key": API_KEY},
    {"Authorization": f"Basic {base64.b64encode(API_KEY.encode()).decode()}"},
    {"Authorization": API_KEY},
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that logs all it can, and its folder."""
    folder = tmp_path_factory.mktemp("secrets")
    with served(
        folder, "--log-level", "TRACE", *(f"{option}=true" for option in EVERYTHING), api_key=API_KEY
    ) as server:
        yield server, folder


def test_no_secret_is_told(process: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, folder = process
    app = create_app(Settings(), ScriptedEngine(tmp_path).manager(), None)
    told = []
    with httpx.Client(base_url=server.base_url, timeout=60) as client:

        def ask(method: str, path: str, keys: dict[str, str], body: bytes) -> None:
            headers = HEADERS | keys | {"Content-Type": "application/json"}
            answer = client.request(method, path, params=QUERY, headers=headers, content=body)
            told.append(answer.text + str(answer.headers))

        for keys, body in itertools.product(KEYS, BODIES.values()):
            ask("POST", "/v1/chat/completions", keys, body)
        for row in (row for row in route_table(app) if not row.alias and not row.path.endswith("/events")):  # no end
            for keys, body in zip(KEYS, itertools.cycle(BODIES.values()), strict=False):
                ask(row.method, row.path, keys, body)
        told.append(client.get(f"/nothing?api_key={MARK}", headers=HEADERS).text)
        assert client.post(f"/v1/model/unload?api_key={API_KEY}").status_code == 401
    written = {path: path.read_text(encoding="utf-8") for path in folder.glob("logs/**/*") if path.is_file()}
    assert any(path.parent.name == "debug" for path in written)
    log = "\n".join(server.log)
    assert '"key": "shown"' in "".join(written.values())
    assert "with headers" in log
    assert "Body: " in log
    secrets = (API_KEY, ADMIN_KEY, WRONG_KEY, MARK, base64.b64encode(API_KEY.encode()).decode())
    for text in (*told, log, *written.values()):
        for line in text.splitlines():
            assert not any(secret in line for secret in secrets), line


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apiKey", "API-KEY", "openai_api_key", "x-admin-key", "token", "hf_token", "HF_TOKEN", "id_token"),
        *("access_token", "huggingface_hub_access_token", "accessToken", "authorization", "Proxy-Authorization"),
        *("password", "db_password", "passphrase", "secret", "client_secret", "private_key", "aws_secret_access_key"),
        *("cookie", "cookies", "credentials", "auth_token", "session_token"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redact_members({name: "x"}) == {name: "[REDACTED]"}


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "max_tokens", "stop_token_ids", "reasoning_start_token", "reasoning_end_token", "token_healing"),
        *("add_bos_token", "ban_eos_token", "key", "keys", "keyboard", "content", "min_tokens", "logit_bias"),
        *("bos_token", "eos_token", "tokenizer", "secretary", "author", "monkey"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert redact_members({name: "x"}) == {name: "x"}


def test_queries_of_urls_in_headers() -> None:
    assert redact_headers({"referer": "http://x/?a=b&c#d"}) == {"referer": "http://x/?[REDACTED]"}
