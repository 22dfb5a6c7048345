"""The server's own certificate: read, checked, and read again when it is renewed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Final, NoReturn

from loguru import logger

from common.config_models import NetworkConfig
from common.errors import SettingsError
from common.file_stamp import FileStamp, file_stamp

POLL_SECONDS: Final = 60.0
_CERTFILE: Final = "network.ssl_certfile"
_KEYFILE: Final = "network.ssl_keyfile"


class ServerCertificate:
    """A certificate and its key, whose changes take effect for new connections while `watch()` runs.

    Attributes:
        context: what connections are accepted with, TLS 1.2 at least.
    """

    def __init__(self, certfile: Path, keyfile: Path) -> None:
        """Read the files; what clients will object to is logged.

        Raises:
            SettingsError: they cannot be read or do not belong together.
        """
        self._certfile, self._keyfile = certfile, keyfile
        self._stamps = self._read_stamps()
        self.context = _load(certfile, keyfile)
        self._warn()

    @classmethod
    def of(cls, settings: NetworkConfig) -> ServerCertificate | None:
        """None for a server that speaks plain http. Raises SettingsError as the constructor does."""
        if settings.ssl_certfile is None and settings.ssl_keyfile is None:
            return None
        for name, value, other in (
            (_CERTFILE, settings.ssl_certfile, _KEYFILE),
            (_KEYFILE, settings.ssl_keyfile, _CERTFILE),
        ):
            if value is None:
                raise SettingsError(f"{other} is set, but {name} is not. https needs both; http neither.")
        return cls(Path(settings.ssl_certfile or ""), Path(settings.ssl_keyfile or ""))

    async def watch(self) -> None:
        """Follow changes of the files until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Read the files again if they changed. What cannot be used is logged, and the certificate stays as it was."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            _load(self._certfile, self._keyfile)  # a failure with the context in use would leave that without a key
            _read_into(self.context, self._certfile, self._keyfile)
        except SettingsError as error:
            logger.warning("The certificate stays as it was: {}", error)
        else:
            logger.info("Read the certificate {} again", self._certfile)
            self._warn()

    def _warn(self) -> None:
        problem = _complaint(self.context, self._certfile)
        if problem is not None:
            logger.warning("Clients will not trust the certificate {}: {}.", self._certfile, problem)

    def _read_stamps(self) -> tuple[FileStamp, FileStamp]:
        return file_stamp(self._certfile), file_stamp(self._keyfile)


def _load(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _read_into(context, certfile, keyfile)
    return context


def _read_into(context: ssl.SSLContext, certfile: Path, keyfile: Path) -> None:
    for name, path in ((_CERTFILE, certfile), (_KEYFILE, keyfile)):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise SettingsError(f"{name}: {path} cannot be read: {error.strerror}.") from error
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except ssl.SSLError as error:
        problem = "the key does not belong to the certificate"
        if error.reason != "KEY_VALUES_MISMATCH":
            problem = "they must hold a private key and its certificate in PEM format"
        raise SettingsError(f"{_KEYFILE}: {keyfile} cannot be used with {certfile}: {problem}.") from error


def _refuse_password() -> NoReturn:
    # OpenSSL would ask for it on the terminal, and wait.
    raise SettingsError(
        f"{_KEYFILE}: the key has a password, which nobody is there to enter at a start. Save it without one, as with: "
        "openssl pkey -in KEY -out NEW_KEY"
    )


def _complaint(context: ssl.SSLContext, certfile: Path) -> str | None:
    """What a client that has this very certificate for an authority says to it; None where it is content.

    The ssl module tells no dates of a certificate but that of a peer: so the two talk to each other, in memory.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):  # hello; certificate; verdict
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return None
