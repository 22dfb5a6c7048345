from __future__ import annotations

import pytest

from common import open_files
from common.open_files import ENOUGH, allow_many_open_files

INFINITY = -1


class System:
    """A system with a limit of open files."""

    RLIMIT_NOFILE = 7
    RLIM_INFINITY = INFINITY

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == self.RLIMIT_NOFILE
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert which == self.RLIMIT_NOFILE
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, 524288, ENOUGH),
        (1024, INFINITY, ENOUGH),
        (100_000, 524288, 100_000),
        (INFINITY, INFINITY, INFINITY),
        (1024, 1024, 1024),
    ],
)
def test_the_limit_is_raised_as_far_as_it_helps(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int
) -> None:
    system = System(soft, hard)
    monkeypatch.setattr(open_files, "resource", system)
    allow_many_open_files()
    assert system.limits == (then, hard)


def test_where_there_is_no_limit_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "resource", None)
    allow_many_open_files()
