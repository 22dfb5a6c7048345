"""How long a model stays loaded, as Ollama's clients say it."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator

FOREVER: Final = -1.0
# From so many seconds on, a hundred years, it is for ever: clocks and dates do not reach much further.
_EVER: Final = 100 * 365 * 86_400
# Go's durations: numbers with units, one after the other.
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION: Final = re.compile(rf"([+-]?)((?:{_PART.pattern})+|\d+\.?\d*)")
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _keep_alive(value: object) -> object:
    """Seconds."""
    if isinstance(value, str):
        value = _seconds(value.strip())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # which is "not a number"
        raise ValueError("should be seconds, or a duration such as 5m")
    return float(value) if 0 <= value < _EVER else FOREVER


def _seconds(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    parts = [float(number) * _SECONDS[unit] for number, unit in _PART.findall(match[2])]
    seconds = sum(parts) if parts else float(match[2])
    return -seconds if match[1] == "-" else seconds


KeepAlive: TypeAlias = Annotated[  # seconds, or FOREVER
    float, BeforeValidator(_keep_alive, json_schema_input_type=float | str)
]
