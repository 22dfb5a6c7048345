"""The version of this program, as pyproject.toml says it: the tree runs from its folder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

_PROJECT: Final = Path(__file__).resolve().parent.parent / "pyproject.toml"

VERSION: Final[str] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"]
