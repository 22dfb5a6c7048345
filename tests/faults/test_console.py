"""A server whose log cannot be written, or whose terminal has gone or was never there, serves on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.endpoints.running import eventually
from tests.serving import MAIN

pytestmark = pytest.mark.skipif(os.name == "nt", reason="shells differ")


@contextmanager
def started(folder: Path, command: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server, started in a folder by a shell command with "$@" for it, and where it listens."""
    (folder / "api_tokens.yml").write_text("api_key: a\nadmin_key: b\n", encoding="utf-8")
    arguments = [*MAIN, "--port", "0"]
    process = subprocess.Popen(["sh", "-c", command, "sh", *arguments], cwd=folder, stderr=subprocess.PIPE)

    def address() -> str | None:
        assert process.poll() is None
        logs = [file.read_text(encoding="utf-8") for file in folder.glob("logs/*.log")]
        found = re.search(r"Listening on (\S+)", "".join(logs))
        return None if found is None else found[1]

    try:
        eventually(lambda: address() is not None)
        yield process, address() or ""
    finally:
        process.terminate()
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(60) == 0


def serves(address: str) -> bool:
    return all(
        httpx.get(f"{address}/{path}").status_code == status
        for path, status in [("health", 200), ("no-such-route", 404)]
    )


@pytest.mark.parametrize("closed", ["2>&-", pytest.param("<&- >&- 2>&-", marks=pytest.mark.slow)])
def test_without_a_console(tmp_path: Path, closed: str) -> None:
    with started(tmp_path, f'exec "$@" {closed}') as (_, address):
        assert serves(address)


@pytest.mark.slow
def test_when_nobody_reads_the_console_any_more(tmp_path: Path) -> None:
    with started(tmp_path, 'exec "$@"') as (process, address):
        assert process.stderr is not None
        process.stderr.close()
        for _ in range(10):
            assert serves(address)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_when_the_console_is_a_full_disk(tmp_path: Path) -> None:
    with started(tmp_path, 'exec "$@" 2>/dev/full') as (_, address):
        assert serves(address)


@pytest.mark.slow
def test_when_the_log_file_is_full(tmp_path: Path) -> None:
    with started(tmp_path, 'ulimit -f 4; exec "$@" 2>/dev/null') as (_, address):
        for _ in range(30):
            assert serves(address)
        [file] = tmp_path.glob("logs/*.log")
        assert file.stat().st_size == 2048
