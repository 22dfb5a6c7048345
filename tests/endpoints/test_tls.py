"""The server over https."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.config_models import Settings
from endpoints import server as server_module
from endpoints.server import Server, create_app, serve
from main import EXIT_SETTINGS, main
from tests.certificates import Certificate, make_certificate
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def secure(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ScriptedEngine(tmp_path_factory.mktemp("secure"))
    engine.add_model("alpha")
    engine.write(Script())
    network = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    with running_server(engine, network=network).running() as running:
        yield running


def client(server: RunningServer, certificate: Certificate) -> httpx.Client:
    """One that trusts the certificate and nothing else."""
    trusting = ssl.create_default_context(cafile=str(certificate.certfile))
    return httpx.Client(base_url=server.base_url.replace("http:", "https:"), verify=trusting, timeout=60)


def test_requests_and_streams(secure: RunningServer, certificate: Certificate) -> None:
    with client(secure, certificate) as https:
        assert https.get("/health").status_code == 200
        key = {"x-admin-key": ADMIN_KEY}
        load = https.post("/v1/model/load", json={"model_name": "alpha"}, headers=key)
        assert '"finished"' in load.text
        key = {"x-api-key": API_KEY}
        stream = https.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=key)
        assert stream.text.rstrip().endswith("data: [DONE]")


def test_plain_http_is_not_spoken(secure: RunningServer) -> None:
    with pytest.raises(httpx.TransportError):
        secure.anonymous.get("/health")


def test_it_has_to_be_trusted(secure: RunningServer) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(secure.base_url.replace("http:", "https:") + "/health")


def test_the_log_says_https_and_the_certificate_is_watched(
    scripted: ScriptedEngine,
    certificate: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
) -> None:
    """A renewed certificate takes effect without a restart."""
    monkeypatch.setattr("common.certificate.POLL_SECONDS", 0.01)
    files = Certificate(tmp_path / "server.pem", tmp_path / "server.key")
    for source, target in ((certificate.certfile, files.certfile), (certificate.keyfile, files.keyfile)):
        shutil.copy(source, target)
    network = {"port": 0, "ssl_certfile": str(files.certfile), "ssl_keyfile": str(files.keyfile)}
    settings = Settings.model_validate({"network": network})
    manager = scripted.manager()
    made: list[Server] = []

    class Noted(Server):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(server_module, "Server", Noted)

    async def scenario() -> None:
        task = asyncio.create_task(serve(create_app(settings, manager, None), settings, manager))
        async with asyncio.timeout(30):
            while not any(line.startswith("Listening on https://127.0.0.1:") for line in log_lines):
                await asyncio.sleep(0.01)
            make_certificate(tmp_path, "server")
            while not any("Read the certificate" in line for line in log_lines):
                await asyncio.sleep(0.01)
            made[0].should_exit = True
            await task

    asyncio.run(scenario())


@pytest.mark.usefixtures("logging_put_back")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ssl-certfile", "x.pem"], "network.ssl_certfile is set, but network.ssl_keyfile is not"),
        (["--ssl-certfile", "x.pem", "--ssl-keyfile", "x.key"], "network.ssl_certfile: x.pem cannot be read"),
    ],
)
def test_a_mistake_stops_the_start(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--port", "0", "--log-file", "false", *options]) == EXIT_SETTINGS
    assert said in capsys.readouterr().err
