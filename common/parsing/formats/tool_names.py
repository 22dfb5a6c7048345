"""Names of tools in what a model writes."""

from __future__ import annotations

import re
from typing import Final

from common.parsing.formats.base import Tool, Tools
from common.parsing.pieces import NoCall, Waiting
from common.parsing.scanner import Scanner

_MORE: Final = re.compile(r"[\w.-]*")


def read_tool(scanner: Scanner, tools: Tools) -> Waiting[Tool]:
    """Read the name of a declared tool, whatever characters it has.

    Raises:
        NoCall: none stands here, or only the beginning of a longer name.
    """
    name = yield from scanner.expect(*tools)
    if (yield from scanner.run(_MORE)):
        raise NoCall
    return tools[name]
