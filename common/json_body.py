"""The JSON of a request's body, in bounds: whoever walks through the value afterwards needs none of his own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from common.errors import InvalidRequest
from common.limits import MAX_BODY_MARKS, MAX_CONTAINERS, MAX_DEPTH

SMALL_BODY: Final = 256 * 1024  # bytes, which are read in a few milliseconds
# The first half of a surrogate pair without the second one, and the second one without the first.
_HALF_PAIR: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)


def read_json(body: bytes) -> Any:
    """The value. Half a surrogate pair, which JSON can express and UTF-8 cannot, becomes a question mark.

    Raises:
        json.JSONDecodeError: it is no JSON.
        InvalidRequest: it is nested too deeply, or holds too much, or what cannot be text or a number.
    """
    opened = body.count(b"[") + body.count(b"{")
    marks = opened + body.count(b",")
    if marks > MAX_BODY_MARKS:
        raise InvalidRequest(
            f"The body has {marks:,} commas and opening brackets; a request may have {MAX_BODY_MARKS:,}. Send less at "
            "once."
        )
    try:
        # In no other encoding (RFC 8259), and strictly: json.loads() by itself lets half a surrogate pair pass.
        value = json.loads(body.decode("utf-8-sig"))
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise InvalidRequest(f"The body cannot be read as JSON: {error}.") from error
    if opened > MAX_DEPTH:
        _check_containers(value)
    if b"\\u" in body and _HALF_PAIR.search(body):
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body is nested too deeply: lists and objects may stand {MAX_DEPTH} deep in each other.")


def _check_containers(value: object) -> None:
    """Raise `InvalidRequest` where a value's lists and objects are too many, or stand too deep in each other."""
    level = [value] if isinstance(value, (list, dict)) else []
    count = len(level)
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return
        count += len(level)
        if count > MAX_CONTAINERS:
            raise InvalidRequest(
                f"The body has more than {MAX_CONTAINERS:,} lists and objects, such as parts of messages. Send less at "
                "once, or the same text in fewer parts."
            )
    raise _too_deep()


def _containers(value: Any) -> Iterator[Any]:
    values = value.values() if type(value) is dict else value
    return (item for item in values if type(item) is dict or type(item) is list)
