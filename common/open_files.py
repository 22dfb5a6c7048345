"""How many files the system lets this process open, its connections included."""

from __future__ import annotations

from typing import Final

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]  # a module elsewhere

ENOUGH: Final = 65536


def allow_many_open_files() -> None:
    """Raise the limit that programs start with to what this one may have.

    It is 1,024 in most places, for the sake of very old programs. Clients that take as many connections would keep an
    engine from being started again.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
