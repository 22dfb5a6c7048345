"""Ids of calls, as Anthropic's API allows them: clients check their alphabet, and some the prefix.

An id that a client sends back becomes the one that it was made from, so that the prompt of a later turn begins as the
turn before it did.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

_OURS: Final = "call_"  # as `common.parsing.events` makes them
_PREFIX: Final = "toolu_"
# Before an id that the model has made itself, in whatever alphabet, as in `functions.ls:0`.
_ENCODED: Final = "toolu_id_"
_PLAIN: Final = re.compile("[A-Za-z0-9]+")


def told_id(call_id: str) -> str:
    """The id that a client is told for a call."""
    plain = call_id.removeprefix(_OURS)
    if plain != call_id and _PLAIN.fullmatch(plain):
        return _PREFIX + plain
    return _ENCODED + urlsafe_b64encode(call_id.encode()).decode().rstrip("=")


def own_id(given: str) -> str:
    """The id that a client has been told as `given`; one that it has from elsewhere is what it is."""
    own = _decoded(given.removeprefix(_ENCODED)) if given.startswith(_ENCODED) else _OURS + given.removeprefix(_PREFIX)
    return own if own is not None and told_id(own) == given else given


def _decoded(encoded: str) -> str | None:
    try:
        return urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return None
