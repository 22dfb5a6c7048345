"""Where fields of a request came from that was made of another API's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import InvalidRequest


@dataclass
class Paths:
    """Where the fields of a chat completion come from, in the body that it was made of."""

    _origins: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, origin: str) -> None:
        self._origins[path] = origin

    def origin(self, path: str) -> str:
        """The path of a field in the body; of one that is in both, the same."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (origin := self._origins.get(".".join(parts[:length]))) is not None:
                return ".".join([origin, *parts[length:]])
        return path

    @contextmanager
    def as_sent(self) -> Iterator[None]:
        """Around what reads the chat completion: errors name the fields that the client has sent."""
        try:
            yield
        except InvalidRequest as error:
            if error.param is None or (origin := self.origin(error.param)) == error.param:
                raise
            raise type(error)(error.message.replace(error.param, origin), param=origin) from error
