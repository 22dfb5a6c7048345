"""A disk without room under what the server itself writes. The disk tier of the engine: `test_engine_real.py`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.auth import KEY_FILE, KeyStore
from common.errors import SettingsError


def test_a_key_file_that_finds_no_room_stops_the_start_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SettingsError, match=f"{KEY_FILE} cannot be written: No space left on device"):
        KeyStore.open(tmp_path / KEY_FILE)
    assert list(tmp_path.iterdir()) == []
