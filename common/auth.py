"""API keys: the file that holds them, and which key opens what.

`api_tokens.yml` holds `api_key`, one key or a list, and `admin_key`. Keys are compared as digests in constant time and
never reach the log.

A request presents a key in `x-admin-key`, in `x-api-key`, or in `Authorization` as `Bearer KEY`. Which of the three
makes no difference, and a request may present several: what the best of them may do, the request may do.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TextIO, TypeAlias

from loguru import logger
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from common.caching import EVERYBODY
from common.errors import AuthenticationFailed, SettingsError
from common.file_stamp import file_stamp
from common.yaml_file import read_mapping

KEY_FILE = "api_tokens.yml"
KEY_BYTES = 16  # of a generated key, as hexadecimal digits
OWNER_BYTES = 8
POLL_SECONDS = 2.0

_NO_KEY = "An API key is needed: send it as the header Authorization: Bearer KEY. Keys are in api_tokens.yml."
_WRONG_KEY = "The API key is not valid."


# What a key may do. An admin key opens everything that an API key does.
Permission: TypeAlias = Literal["api", "admin"]


class Caller(NamedTuple):
    """Who sends a request.

    Attributes:
        permission: what the request may do.
        owner: stands for the key among what engines keep of prompts; `common.caching.EVERYBODY` for an administrator.
            It is the same until the server ends, and says nothing about the key.
    """

    permission: Permission
    owner: str


ADMINISTRATOR = Caller("admin", EVERYBODY)


def _check_key(key: str) -> str:
    # Anything else would not survive the way through an HTTP header.
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise ValueError("not a key")
    return key


_Key = Annotated[str, AfterValidator(_check_key)]


class _KeyFile(BaseModel):
    """The content of `api_tokens.yml`."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    api_key: Annotated[list[_Key], Field(min_length=1)]
    admin_key: _Key

    @field_validator("api_key", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class KeyStore:
    """The keys of one `api_tokens.yml`, whose changes take effect while `watch()` runs."""

    def __init__(self, path: Path) -> None:
        """Read the keys.

        Raises:
            SettingsError: the file is missing or cannot be used; says what is wrong with it, and quotes no key.
        """
        self._path = path
        self._secret = secrets.token_bytes()  # so that an owner is no help in trying out keys
        self._stamp = file_stamp(path)
        self._api_keys, self._admin_key = _read(path)

    @classmethod
    def open(cls, path: Path = Path(KEY_FILE), terminal: TextIO | None = None) -> KeyStore:
        """Read the keys; where the file is missing, make keys first and show the API key on the terminal.

        Args:
            path: the file.
            terminal: where to show a new key, by default stderr; nothing is shown where that is no terminal.
        """
        terminal = terminal or sys.stderr  # None where it is closed
        if not path.exists():
            api_key = _create(path)
            logger.info("New keys were written to {}", path)
            if terminal is not None and terminal.isatty():
                print(f"\n  New keys are in {path.absolute()}\n  API key: {api_key}\n", file=terminal, flush=True)
        elif os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
            logger.warning("{} can be read by every user of this machine; chmod 600 changes that.", path)
        return cls(path)

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Whose keys the headers hold, whose names are in lower case. `items()` may give a name more than once.

        Raises:
            AuthenticationFailed: no key, or none that is valid. Whatever the headers hold, nothing else is raised.
        """
        digests = [_digest(key) for key in _presented_keys(headers)]
        # Each key is compared with each other one, so that the time says nothing about which of them matches.
        admin_matches = sum(hmac.compare_digest(digest, self._admin_key) for digest in digests)
        valid = [digest for digest in digests if sum(hmac.compare_digest(digest, key) for key in self._api_keys)]
        if admin_matches:
            return ADMINISTRATOR
        if valid:
            return Caller("api", hmac.digest(self._secret, valid[0], "sha256")[:OWNER_BYTES].hex())
        raise AuthenticationFailed(_WRONG_KEY if digests else _NO_KEY)

    async def watch(self) -> None:
        """Follow changes of the file until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Read the file again if it changed. What cannot be used is logged, and the keys stay as they are."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._api_keys, self._admin_key = _read(self._path)
        except SettingsError as error:
            logger.warning("The keys stay as they were: {}", error)
        else:
            logger.info("Read {} again: {} API key(s) and the admin key", self._path, len(self._api_keys))


def _presented_keys(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():  # a header may come more than once
        key = value.strip()
        if name == "authorization":
            scheme, _, token = key.partition(" ")
            key = token.strip() if scheme.lower() == "bearer" else ""
        elif name not in ("x-admin-key", "x-api-key"):
            continue
        if key:
            yield key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path) -> tuple[list[bytes], bytes]:
    """Digests of the API keys and of the admin key."""
    try:
        keys = _KeyFile.model_validate(read_mapping(path))
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist.") from None
    except ValidationError as error:
        fields = sorted({str(detail["loc"][0]) for detail in error.errors(include_input=False)})
        raise SettingsError(
            f"{path}: {' and '.join(fields)} cannot be used. It must hold admin_key, a key, and api_key, a key or a "
            "list of keys. A key is text without spaces; put quotes around digits. "
            "Delete the file to have new keys made."
        ) from None
    return [_digest(key) for key in keys.api_key], _digest(keys.admin_key)


def _create(path: Path) -> str:
    """Write a file with new keys that only its owner may read, as a whole or not at all; returns the API key."""
    api_key, admin_key = secrets.token_hex(KEY_BYTES), secrets.token_hex(KEY_BYTES)
    try:
        # mkstemp creates with mode 0600.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f'api_key: "{api_key}"\nadmin_key: "{admin_key}"\n')
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}. Make its folder writable, or set network.disable_auth."
        ) from error
    return api_key
