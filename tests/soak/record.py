"""What happened during a soak: requests, and times in which some of them may fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

Outcome = Literal["right", "refused", "error", "left", "wrong", "broken", "hung"]
WindowKind = Literal["kill", "load", "unload", "burst"]

BUSY: Final = {"server_busy", "rate_limit_exceeded", "queue_timeout"}
# What a request may be told while the model comes and goes; those who were refused earlier may still be waiting.
HONEST: Final[dict[WindowKind, set[str]]] = {
    "kill": {"engine_failed", "model_not_loaded", *BUSY},
    "load": {"request_cancelled", "model_not_loaded", *BUSY},
    "unload": {"request_cancelled", "model_not_loaded", *BUSY},
    "burst": BUSY,
}


@dataclass
class Asked:
    """One request.

    Attributes:
        kind: what was asked, and how.
        state: how far it is, for whoever wonders where it hangs.
        outcome: "refused" is a bad request that was told so; "left" one whose client went away.
        code: of the error.
        detail: what is wrong.
    """

    kind: str
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    state: str = "not sent"
    outcome: Outcome = "hung"
    code: str | None = None
    detail: str = ""


@dataclass
class Window:
    kind: WindowKind
    started: float
    ended: float = float("inf")


@dataclass
class Record:
    """
    Attributes:
        violations: what must not happen, in words.
        recoveries: seconds from each kill until /ready said 200.
        loads: outcomes of an administrator's requests, by their kind.
        health: seconds that each answer of /health took.
    """

    started: float = field(default_factory=time.monotonic)
    asked: list[Asked] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    loads: list[tuple[str, str]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    near_ties: int = 0

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.started

    def violation(self, text: str) -> None:
        self.violations.append(f"at {self.now:.0f} s: {text}")

    @contextmanager
    def window(self, kind: WindowKind) -> Iterator[Window]:
        window = Window(kind, time.monotonic())
        self.windows.append(window)
        try:
            yield window
        finally:
            window.ended = time.monotonic()

    def windows_of(self, asked: Asked) -> set[WindowKind]:
        """Those that overlap a request."""
        return {
            window.kind for window in self.windows if window.started <= asked.ended and window.ended >= asked.started
        }

    def end(self, asked: Asked) -> None:
        asked.ended = time.monotonic()
        self.asked.append(asked)
        if asked.outcome in ("wrong", "broken", "hung"):
            self.violation(f"{asked.outcome}: {asked.kind}: {asked.detail} (state: {asked.state})")
        elif asked.outcome == "error":
            windows = self.windows_of(asked)
            if asked.code not in set().union(*(HONEST[kind] for kind in windows)):
                where = f"while {', '.join(sorted(windows))}" if windows else "at a quiet time"
                self.violation(f"error {asked.code} {where}: {asked.kind}: {asked.detail}")
