"""`python main.py` as a process, the way a user starts it."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from openai import OpenAI

ROOT = Path(__file__).parents[1]
MAIN = (sys.executable, str(ROOT / "main.py"))
API_KEY, ADMIN_KEY = "test-api-key", "test-admin-key"
START_SECONDS = 120
# For all clients: each would read the authorities' certificates anew, which takes longer than most requests.
TRUSTED = ssl.create_default_context()


def openai_client(base_url: str, key: str) -> OpenAI:
    """The official client, strict about what it reads."""
    from openai import DefaultHttpxClient, OpenAI  # takes a second, which most tests need not spend

    return OpenAI(
        base_url=f"{base_url}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        http_client=DefaultHttpxClient(verify=TRUSTED),
        _strict_response_validation=True,
    )


@dataclass
class ServerProcess:
    """A running server.

    Attributes:
        model: name of the model that it was started with, or None.
        log: what it has written to stderr so far, by line.
    """

    process: subprocess.Popen[str]
    model: str | None
    log: list[str] = field(default_factory=list)
    base_url: str = ""
    api_key: str = API_KEY
    admin_key: str = ADMIN_KEY

    def client(self, key: str = API_KEY) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=120, verify=TRUSTED)

    def openai(self) -> OpenAI:
        return openai_client(self.base_url, self.api_key)

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if address := re.search(r"Listening on (http://\S+)", line):
                self.base_url = address.group(1)

    def wait_until(self, path: str) -> None:
        """Wait until a route answers 200."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, "\n".join(self.log)
            assert time.monotonic() < deadline, "\n".join(self.log)
            try:
                if self.base_url and httpx.get(self.base_url + path, verify=TRUSTED).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.05)


@contextmanager
def served(
    folder: Path,
    *arguments: str,
    model: Path | None = None,
    ready: bool = True,
    api_key: str = API_KEY,
    program: Sequence[str] = MAIN,
) -> Iterator[ServerProcess]:
    """Start the server in a folder, where it finds its keys and writes its logs, and stop it in the end.

    Args:
        folder: working directory.
        arguments: more options for main.py.
        model: folder of the model to load at start.
        ready: wait until the model answers, instead of until the server does.
        api_key: key that is no administrator's.
        program: what to start with the options.
    """
    (folder / "api_tokens.yml").write_text(f"api_key: {api_key}\nadmin_key: {ADMIN_KEY}\n", encoding="utf-8")
    command = [*program, "--port", "0", *arguments]
    if model is not None:
        command += ["--model-dir", str(model.parent), "--model-name", model.name]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    server = ServerProcess(process, model.name if model else None, api_key=api_key)
    reader = threading.Thread(target=server.read_log)
    reader.start()
    try:
        server.wait_until("/ready" if model is not None and ready else "/health")
        yield server
    finally:
        process.terminate()
        process.wait(60)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
