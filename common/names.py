"""Names that requests give, and the files that they may stand for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

# Names that Windows opens as devices in every folder, whatever follows the first dot.
_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE)
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_LATEST: Final = ":latest"


def is_plain_name(name: str) -> bool:
    """Whether a text can only name something in the folder that it is looked up in, on every system.

    No separator, no drive, no device, and nothing that stands for a folder itself or its parent. Percent signs have no
    meaning in names. It may still be longer than file systems allow.
    """
    return (
        name.isprintable()  # neither NUL nor half a surrogate pair
        and not set(name) & {"/", "\\"}
        and name.strip(". ") != ""  # Windows drops dots and spaces at the end
        and not _DRIVE.match(name)
        and not _DEVICE.fullmatch(name)
    )


def path_within(folder: Path, name: str) -> Path | None:
    """The path of a name, or of several in a row with slashes between them; None where one of them is not plain.

    What is linked into the folder is in it.
    """
    parts = name.split("/")
    return folder.joinpath(*parts) if all(map(is_plain_name, parts)) else None


def tagged(name: str) -> str:
    """A model's name as Ollama's clients know names: with a tag."""
    return name if ":" in name else name + _LATEST


def untagged(name: str) -> str:
    """A model's name without the tag that stands for none."""
    return name.removesuffix(_LATEST)
