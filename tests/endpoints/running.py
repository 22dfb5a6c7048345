"""The whole server on a free port, in a thread of its own, over the scripted engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI

from common.auth import KeyStore
from common.config_models import Settings
from common.sampling import SamplerPresets
from endpoints.server import Server, create_app
from endpoints.state import application_state
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script
from tests.serving import TRUSTED, openai_client

T = TypeVar("T")

API_KEY, OTHER_KEY = "an-api-key", "another-api-key"
ADMIN_KEY = "an-admin-key"
CHATML = (Path(__file__).parents[2] / "templates" / "chatml.jinja").read_text(encoding="utf-8")


class RunningServer:
    """
    Attributes:
        http: a client with the API key.
        other: a client with another API key.
        admin: a client with the admin key.
        anonymous: a client without a key.
        state: what its routes share.
    """

    def __init__(self, engine: ScriptedEngine, settings: Settings, keys: KeyStore | None) -> None:
        self.engine = engine
        self.manager = engine.manager(engine_timeout=settings.network.engine_timeout, selection=settings.model)
        self.settings = settings
        self._keys = keys
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._loop: asyncio.AbstractEventLoop
        self._server: Server

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        presets = SamplerPresets(self.engine.root / "presets")
        app = create_app(self.settings, self.manager, self._keys, presets)
        self.state = application_state(app)
        self._server = Server(app, self.settings, self.manager)
        self._listening.set()
        await self._server.serve()

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        self._thread.start()
        assert self._listening.wait(10)
        try:
            with (
                self._client(API_KEY) as self.http,
                self._client(OTHER_KEY) as self.other,
                self._client(ADMIN_KEY) as self.admin,
                self._client() as self.anonymous,
            ):
                yield self
        finally:
            self.stop()
            self.join()

    def stop(self) -> None:
        """What a signal does."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    def _client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=60, verify=TRUSTED)

    def openai(self) -> OpenAI:
        return openai_client(self.base_url, API_KEY)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def load(self, name: str, **model: object) -> None:
        response = self.admin.post("/v1/model/load", json={"model_name": name, **model})
        assert response.status_code == 200, response.text
        assert '"status":"finished"' in response.text, response.text

    @property
    def connections(self) -> set[Any]:
        """That clients have open."""
        return self._server.server_state.connections

    @property
    def requests_in_engine(self) -> int:
        client = self.manager.current
        return 0 if client is None else client.running

    def idle(self) -> bool:
        return self.requests_in_engine == 0


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what must become true, as long as the test may take."""
    while not condition():
        time.sleep(0.01)


def running_server(
    engine: ScriptedEngine, *, auth: bool = True, presets: dict[str, str] | None = None, **sections: object
) -> RunningServer:
    """A server for the models of a scripted engine; all of them get ChatML as their template."""
    for directory in engine.model_dir.iterdir():
        (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    for name, text in (presets or {}).items():
        path = engine.root / "presets" / f"{name}.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    key_file = engine.root / "api_tokens.yml"
    key_file.write_text(f"api_key: [{API_KEY}, {OTHER_KEY}]\nadmin_key: {ADMIN_KEY}\n", encoding="utf-8")
    network = {"host": "127.0.0.1", "port": 0, "sse_ping_interval": 1, "shutdown_timeout": 0}
    given = sections.pop("network", {})
    assert isinstance(given, dict)
    settings = Settings.model_validate({"network": network | given, **sections})
    return RunningServer(engine, settings, KeyStore(key_file) if auth else None)


@contextmanager
def alpha_server(root: Path, plays: Sequence[Play], **sections: object) -> Iterator[RunningServer]:
    """A server with one scripted model, "alpha", which is loaded."""
    engine = ScriptedEngine(root)
    engine.add_model("alpha")
    engine.write(Script(plays=list(plays)))
    with running_server(engine, **sections).running() as running:  # type: ignore[arg-type]  # of its sections
        running.load("alpha")
        yield running
