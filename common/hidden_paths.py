"""Texts that may name files, for people who may not know where the server keeps them."""

from __future__ import annotations

import re

# An absolute path, in quotes or not: of POSIX, or of Windows with a drive. Routes of the API look like one.
_QUOTED = re.compile(r"""(?P<quote>["'])(?:[A-Za-z]:)?[/\\](?!v1/)[^"'\n]*[/\\](?P<name>[^"'/\\\n]+)[/\\]*(?P=quote)""")
_BARE = re.compile(
    r"""(?<![\w:/.~\\"'])(?:[A-Za-z]:[/\\]|/(?!v1/))(?:[^\s/\\"'<>|]+[/\\]+)+(?P<name>[^\s/\\"'<>|:;,()]*)"""
)


def hide_paths(text: str) -> str:
    """The text with each absolute path cut to the name that it ends with."""
    text = _QUOTED.sub(lambda match: match["quote"] + match["name"] + match["quote"], text)
    return _BARE.sub(lambda match: match["name"] or "a folder", text)
