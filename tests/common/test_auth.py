"""Keys: making, reading, following and comparing them, and keeping them out of the log."""

from __future__ import annotations

import asyncio
import hmac
import io
import os
import stat
import sys
from pathlib import Path

import pytest

from common import auth
from common.auth import KeyStore
from common.caching import EVERYBODY
from common.errors import AuthenticationFailed, SettingsError
from common.yaml_file import read_mapping


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api_tokens.yml"


@pytest.fixture
def store(path: Path) -> KeyStore:
    path.write_text("api_key: [api-1, api-2]\nadmin_key: admin-1\n")
    return KeyStore(path)


def write_anew(path: Path, text: str) -> None:
    """Write a file so that its time changes however quick the test is."""
    modified = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(modified + 10**9, modified + 10**9))


# --- which key opens what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "permission"),
    [
        ({"authorization": "Bearer api-1"}, "api"),
        ({"authorization": "bearer api-2"}, "api"),
        ({"authorization": "Bearer   api-2 "}, "api"),
        ({"authorization": "Bearer admin-1"}, "admin"),
        ({"x-api-key": "api-1"}, "api"),
        ({"x-api-key": "admin-1"}, "admin"),
        ({"x-admin-key": "admin-1"}, "admin"),
        ({"x-admin-key": "api-1"}, "api"),
        ({"x-admin-key": "junk", "x-api-key": "api-1"}, "api"),
        ({"x-admin-key": "junk", "x-api-key": "junk", "authorization": "Bearer admin-1"}, "admin"),
        ({"x-api-key": "api-1", "authorization": "Bearer admin-1"}, "admin"),
        ({"x-api-key": "admin-1", "authorization": "Bearer api-1"}, "admin"),
        ({"x-api-key": "", "authorization": "Bearer api-1"}, "api"),
        ({"authorization": "Basic abc", "x-api-key": "api-1"}, "api"),
    ],
)
def test_the_best_valid_key_counts(store: KeyStore, headers: dict[str, str], permission: str) -> None:
    assert store.identify(headers).permission == permission


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "api-1"},
        {"authorization": "Basic api-1"},
        {"x-api-key": " "},
    ],
)
def test_no_key_is_said_to_be_missing(store: KeyStore, headers: dict[str, str]) -> None:
    with pytest.raises(AuthenticationFailed, match=r"An API key is needed: .*Authorization: Bearer KEY"):
        store.identify(headers)


@pytest.mark.parametrize(
    "key", ["junk", "api-1x", "api-", "api-1 api-2", "\xff\xfe", "\ud800", "\x00", "a" * 100_000, "['api-1']", "ａpi-1"]
)
@pytest.mark.parametrize("header", ["x-api-key", "x-admin-key", "authorization"])
def test_junk_is_refused_and_nothing_else(store: KeyStore, header: str, key: str) -> None:
    with pytest.raises(AuthenticationFailed, match="not valid"):
        store.identify({header: f"Bearer {key}" if header == "authorization" else key})


def test_keys_are_compared_in_constant_time(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    store.identify({"x-api-key": "api-1"})
    assert len(compared) == 3  # both API keys and the admin key, although the first one matched
    assert {len(digest) for pair in compared for digest in pair} == {32}


# --- who owns a request ---------------------------------------------------------------------------------------------


def owner(store: KeyStore, key: str) -> str:
    return store.identify({"x-api-key": key}).owner


def test_each_api_key_has_an_owner_of_its_own(store: KeyStore) -> None:
    first, second = owner(store, "api-1"), owner(store, "api-2")
    assert first != second
    assert EVERYBODY not in (first, second)
    assert store.identify({"authorization": "Bearer api-1"}).owner == first
    assert store.identify({"x-api-key": "junk", "authorization": "Bearer api-1"}).owner == first
    assert store.identify({"x-api-key": "api-2", "authorization": "Bearer api-1"}).owner == second


def test_an_administrator_stands_for_everybody(store: KeyStore) -> None:
    assert store.identify({"x-admin-key": "admin-1", "x-api-key": "api-1"}) == ("admin", EVERYBODY)


def test_an_owner_stays_when_the_file_changes(store: KeyStore, path: Path) -> None:
    before = owner(store, "api-2")
    write_anew(path, "api_key: [fresh, api-2]\nadmin_key: admin-2\n")
    store.reload()
    assert owner(store, "api-2") == before


def test_an_owner_says_nothing_about_the_key(store: KeyStore, path: Path) -> None:
    assert owner(store, "api-1") != owner(KeyStore(path), "api-1")  # so trying keys against it is of no use
    assert len(owner(store, "api-1")) == 2 * auth.OWNER_BYTES


# --- the file -----------------------------------------------------------------------------------------------------


def test_missing_file_is_made(path: Path, log_lines: list[str]) -> None:
    terminal = Terminal()
    store = KeyStore.open(path, terminal)
    keys = read_mapping(path)
    assert set(keys) == {"api_key", "admin_key"}
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys.values())
    assert keys["api_key"] != keys["admin_key"]
    assert store.identify({"x-api-key": keys["api_key"]}).permission == "api"
    assert store.identify({"x-api-key": keys["admin_key"]}).permission == "admin"
    assert keys["api_key"] in terminal.getvalue()
    assert str(path) in terminal.getvalue()
    assert keys["admin_key"] not in terminal.getvalue()
    assert not any(key in line for key in keys.values() for line in log_lines)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="no file modes")
def test_new_file_is_for_its_owner_only(path: Path) -> None:
    old = os.umask(0)
    try:
        KeyStore.open(path, io.StringIO())
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="no file modes")
def test_a_file_that_others_can_read_is_warned_of(path: Path, log_lines: list[str]) -> None:
    path.write_text("api_key: only\nadmin_key: admin\n")
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        path.chmod(mode)
        KeyStore.open(path, io.StringIO())
        assert (log_lines != []) == warned
    assert "chmod 600" in log_lines[0]


def test_new_key_is_shown_on_a_terminal_only_and_once(path: Path) -> None:
    no_terminal = io.StringIO()
    KeyStore.open(path, no_terminal)
    assert no_terminal.getvalue() == ""
    terminal = Terminal()
    KeyStore.open(path, terminal)
    assert terminal.getvalue() == ""


def test_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written: .*network\.disable_auth"):
        KeyStore.open(tmp_path / "absent" / "api_tokens.yml", io.StringIO())


def test_failure_while_writing_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SettingsError, match="No space left"):
        KeyStore.open(path, io.StringIO())
    assert list(path.parent.iterdir()) == []


def test_one_key_as_text(path: Path) -> None:
    path.write_text("api_key: only\nadmin_key: admin\n")
    assert KeyStore(path).identify({"x-api-key": "only"}).permission == "api"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "admin_key and api_key"),
        ("api_key: s3cret\n", "admin_key"),
        ("api_key: []\nadmin_key: s3cret\n", "api_key"),
        ("api_key: ''\nadmin_key: s3cret\n", "api_key"),
        ("api_key: ['s3cret', '']\nadmin_key: s3cret\n", "api_key"),
        ("api_key: 12345\nadmin_key: s3cret\n", "api_key"),
        ("api_key: s3cret\nadmin_key: [s3cret]\n", "admin_key"),
        ("api_key: s3cret key\nadmin_key: s3cret\n", "api_key"),
        ("api_key: s3crét\nadmin_key: s3cret\n", "api_key"),
        ("api_key: s3cret\napi_key: s3cret2\nadmin_key: x\n", "line 2"),
        ("api_key: 's3cret\nadmin_key: x\n", "line 3"),
        ("- s3cret\n", "must hold keys"),
    ],
)
def test_file_that_cannot_be_used_is_named_without_its_keys(path: Path, text: str, names: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError) as raised:
        KeyStore.open(path, io.StringIO())
    message = str(raised.value)
    assert str(path) in message
    assert names in message
    assert "s3cr" not in message
    assert raised.value.__cause__ is None
    assert path.read_text() == text


# --- changes ------------------------------------------------------------------------------------------------------


def test_changed_file_takes_effect(store: KeyStore, path: Path, log_lines: list[str]) -> None:
    write_anew(path, "api_key: fresh\nadmin_key: admin-2\n")
    store.reload()
    assert store.identify({"x-api-key": "fresh"}).permission == "api"
    with pytest.raises(AuthenticationFailed):
        store.identify({"x-api-key": "api-1"})
    assert "1 API key(s)" in log_lines[0]
    assert "fresh" not in log_lines[0]


def test_unchanged_file_is_not_read(store: KeyStore, log_lines: list[str]) -> None:
    store.reload()
    assert log_lines == []


def test_broken_file_leaves_the_keys_and_warns_once(store: KeyStore, path: Path, log_lines: list[str]) -> None:
    write_anew(path, "api_key: s3cret\n")
    store.reload()
    store.reload()
    assert store.identify({"x-api-key": "api-1"}).permission == "api"
    assert len(log_lines) == 1
    assert "The keys stay as they were" in log_lines[0]
    assert "s3cret" not in log_lines[0]


def test_deleted_file_leaves_the_keys(store: KeyStore, path: Path, log_lines: list[str]) -> None:
    path.unlink()
    store.reload()
    assert store.identify({"x-api-key": "api-2"}).permission == "api"
    assert len(log_lines) == 1
    path.write_text("api_key: back\nadmin_key: admin-1\n")
    store.reload()
    assert store.identify({"x-api-key": "back"}).permission == "api"


def test_watch_follows_changes_until_cancelled(store: KeyStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "POLL_SECONDS", 0.01)

    async def scenario() -> None:
        task = asyncio.create_task(store.watch())
        write_anew(path, "api_key: fresh\nadmin_key: admin-1\n")
        async with asyncio.timeout(10):
            while True:
                try:
                    assert store.identify({"x-api-key": "fresh"}).permission == "api"
                    break
                except AuthenticationFailed:
                    await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
