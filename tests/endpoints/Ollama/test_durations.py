from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from endpoints.Ollama.types.duration import KeepAlive

FOREVER = -1.0
ADAPTER: TypeAdapter[float] = TypeAdapter(KeepAlive)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        (1.5, 1.5),
        (-1, FOREVER),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("24h", 86400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        ("0", 0.0),
        ("0s", 0.0),
        ("300", 300.0),
        ("-1", FOREVER),
        ("-1m", FOREVER),
        (" 5m ", 300.0),
        ("876000h", FOREVER),  # a hundred years
        (1e300, FOREVER),
        (10**400, FOREVER),
        (-(10**400), FOREVER),
        ("9" * 400 + "s", FOREVER),
    ],
)
def test_durations(given: object, seconds: float) -> None:
    assert ADAPTER.validate_python(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "5x", "5m3", "1e3", True, [], {}, math.nan])
def test_what_is_none(given: object) -> None:
    with pytest.raises(ValidationError, match="should be seconds, or a duration such as 5m"):
        ADAPTER.validate_python(given)
