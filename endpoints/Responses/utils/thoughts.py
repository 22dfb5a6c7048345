"""Thoughts that clients keep and send back without a look at them (`encrypted_content`).

It is no secret: a client may read its model's thoughts. It is what clients of OpenAI's API hand back unchanged when the
server stores nothing, where they would drop a thought in plain text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

_PREFIX: Final = "waypoint1."


def sealed(thought: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(thought.encode()).decode()


def unsealed(text: str) -> str | None:
    """The thought; None for what another server has made."""
    if not text.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(text.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
