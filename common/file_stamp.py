"""Whether a file has changed since it was read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

FileStamp: TypeAlias = tuple[int, int] | None


def file_stamp(path: Path) -> FileStamp:
    """Modification time and size, which change when the file does; None while there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
