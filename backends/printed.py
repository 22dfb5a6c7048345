"""What an engine process prints, as lines of the log."""

from __future__ import annotations

import asyncio

from loguru import logger

# Of a line, and of all of them in one second: a library that floods stderr shall not flood the log.
LINE_BYTES = 2000
LINES_PER_SECOND = 50


class PrintedLines:
    """Cuts what comes into lines and logs them. Too much at once is counted and not logged.

    Attributes:
        last: the last line.
    """

    def __init__(self, name: str) -> None:
        self.last = ""
        self._name = name
        self._line = bytearray()  # the beginning of the line that has not ended
        self._second = 0.0  # when the second began in which lines are counted
        self._lines = 0
        self._dropped = 0

    def feed(self, part: bytes) -> None:
        *ended, rest = part.split(b"\n")
        for line in ended:
            self._add(line)
            self._log()
        self._add(rest)

    def end(self) -> None:
        """Nothing more comes."""
        if self._line:
            self._log()
        self._report_dropped()

    def _add(self, part: bytes) -> None:
        self._line += part[: LINE_BYTES - len(self._line)]

    def _log(self) -> None:
        text = self._line.decode("utf-8", "replace").rstrip()
        self._line.clear()
        self.last = text or self.last
        loop = asyncio.get_running_loop()
        if loop.time() - self._second >= 1.0:
            self._second, self._lines = loop.time(), 0
        self._lines += 1
        if self._lines <= LINES_PER_SECOND:
            logger.info("[engine {}] {}", self._name, text)
            return
        if not self._dropped:
            loop.call_later(1.0, self._report_dropped)
        self._dropped += 1

    def _report_dropped(self) -> None:
        if self._dropped:
            logger.warning("[engine {}] printed {} more lines, too fast for the log", self._name, self._dropped)
            self._dropped = 0
