from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from common import certificate
from common.certificate import ServerCertificate
from common.config_models import NetworkConfig
from common.errors import SettingsError
from tests.certificates import Certificate, make_certificate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("second"))


@pytest.fixture
def files(made: Certificate, tmp_path: Path) -> Certificate:
    """A copy, to be changed."""
    return copy(made, Certificate(tmp_path / "server.pem", tmp_path / "server.key"))


def copy(source: Certificate, target: Certificate) -> Certificate:
    shutil.copy(source.certfile, target.certfile)
    shutil.copy(source.keyfile, target.keyfile)
    return target


def touch(*paths: Path) -> None:
    """Change the times of files, however quick the test is."""
    for path in paths:
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def settings(certfile: Path | None, keyfile: Path | None) -> NetworkConfig:
    return NetworkConfig(
        ssl_certfile=None if certfile is None else str(certfile), ssl_keyfile=None if keyfile is None else str(keyfile)
    )


def shown(context: ssl.SSLContext, trusted: Path | None = None) -> bytes:
    """The certificate that a client gets to see."""
    client_side, server_side = socket.socketpair()
    with client_side, server_side:
        client_side.setblocking(False)
        server_side.setblocking(False)
        trusting = ssl.create_default_context(cafile=None if trusted is None else str(trusted))
        if trusted is None:
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        client = trusting.wrap_socket(client_side, server_hostname="localhost", do_handshake_on_connect=False)
        server = context.wrap_socket(server_side, server_side=True, do_handshake_on_connect=False)
        with client, server:
            for side in (client, server, client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
            found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def der(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.certfile.read_text())


def test_without_settings_there_is_none() -> None:
    assert ServerCertificate.of(NetworkConfig()) is None


def test_a_certificate_is_shown_and_trusted(made: Certificate, log_lines: list[str]) -> None:
    certificate = ServerCertificate.of(settings(made.certfile, made.keyfile))
    assert certificate is not None
    assert shown(certificate.context, trusted=made.certfile) == der(made)
    assert certificate.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert log_lines == []


@pytest.mark.parametrize(
    ("certfile", "keyfile", "said"),
    [
        ("server.pem", None, r"network\.ssl_certfile is set, but network\.ssl_keyfile is not"),
        (None, "server.key", r"network\.ssl_keyfile is set, but network\.ssl_certfile is not"),
        ("none.pem", "server.key", r"network\.ssl_certfile: .*none\.pem cannot be read: No such file"),
        ("server.pem", "none.key", r"network\.ssl_keyfile: .*none\.key cannot be read: No such file"),
        ("", "server.key", r"network\.ssl_certfile: .* cannot be read: Is a directory|denied"),
        ("server.pem", "other.key", r"network\.ssl_keyfile: .*: the key does not belong to the certificate\."),
        ("server.pem", "server.pem", r"in PEM format"),
        ("server.key", "server.key", r"in PEM format"),
        ("garbage.pem", "server.key", r"in PEM format"),
        ("server.pem", "locked.key", r"network\.ssl_keyfile: the key has a password"),
    ],
)
def test_what_cannot_be_used(
    certfile: str | None, keyfile: str | None, said: str, files: Certificate, other: Certificate, tmp_path: Path
) -> None:
    shutil.copy(other.keyfile, tmp_path / "other.key")
    (tmp_path / "garbage.pem").write_bytes(b"\xff\x00")
    if keyfile == "locked.key":
        command = ("openssl", "pkey", "-in", files.keyfile, "-aes256", "-passout", "pass:secret", "-out")
        subprocess.run([*command, tmp_path / "locked.key"], check=True)
    paths = [None if name is None else tmp_path / name for name in (certfile, keyfile)]
    with pytest.raises(SettingsError, match=said):
        ServerCertificate.of(settings(*paths))


def test_an_expired_certificate_is_used_with_a_warning(tmp_path: Path, log_lines: list[str]) -> None:
    expired = make_certificate(tmp_path, days=-1)
    assert shown(ServerCertificate(expired.certfile, expired.keyfile).context) == der(expired)
    assert len(log_lines) == 1
    assert "certificate has expired" in log_lines[0]


def test_a_renewed_certificate_is_shown_to_new_clients(
    files: Certificate, made: Certificate, other: Certificate, log_lines: list[str]
) -> None:
    certificate = ServerCertificate(files.certfile, files.keyfile)
    certificate.reload()
    assert (shown(certificate.context), log_lines) == (der(made), [])
    copy(other, files)
    touch(files.certfile, files.keyfile)
    certificate.reload()
    assert shown(certificate.context) == der(other)
    assert len(log_lines) == 1


def test_a_broken_renewal_changes_nothing(
    files: Certificate, made: Certificate, other: Certificate, log_lines: list[str]
) -> None:
    certificate = ServerCertificate(files.certfile, files.keyfile)
    shutil.copy(other.certfile, files.certfile)  # the key is still to come
    touch(files.certfile)
    certificate.reload()
    certificate.reload()
    assert len(log_lines) == 1
    assert "The certificate stays as it was" in log_lines[0]
    assert shown(certificate.context, trusted=made.certfile) == der(made)
    shutil.copy(other.keyfile, files.keyfile)
    touch(files.keyfile)
    certificate.reload()
    assert shown(certificate.context, trusted=other.certfile) == der(other)


async def test_files_are_watched(files: Certificate, other: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "POLL_SECONDS", 0.01)
    watched = ServerCertificate(files.certfile, files.keyfile)
    task = asyncio.create_task(watched.watch())
    copy(other, files)
    touch(files.certfile, files.keyfile)
    async with asyncio.timeout(10):
        while shown(watched.context) != der(other):
            await asyncio.sleep(0.01)
    task.cancel()
