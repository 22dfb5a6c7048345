"""Connections that do not get on, and so are closed: whose request does not come, or whose client does not read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from loguru import logger

from common.config_models import NetworkConfig
from endpoints.protocol import HttpProtocol


class TimedProtocol(HttpProtocol):
    """HTTP whose clients have a limited time for the head of a request, and for reading what is sent.

    uvicorn itself only closes connections between two requests. How long a body may take is told in the envelope of the
    route's API, see `BodyTimeoutMiddleware`.
    """

    def __init__(self, network: NetworkConfig, **arguments: Any) -> None:
        """
        Args:
            network: `body_timeout` and `stream_timeout` count.
            arguments: of uvicorn.
        """
        super().__init__(**arguments)
        self._head_timeout = network.body_timeout
        self._read_timeout = network.stream_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timeout:
            self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer(self._head_timer)
        self._stop_timer(self._read_timer)

    def _expect_head(self) -> None:
        """From its first byte on, or from that of the connection, a head has its time."""
        if self._head_timeout and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout, self.timeout_keep_alive_handler)

    def _expect_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._read_timeout, self._check_reader, left)

    def _check_reader(self, left: int) -> None:
        """`left`: bytes that waited for the client before the time began."""
        if self.transport.get_write_buffer_size() < left:
            self._expect_reader()
            return
        logger.warning(
            "A client has read nothing for {} s (network.stream_timeout); its connection is closed", self._read_timeout
        )
        self.transport.abort()

    @staticmethod
    def _stop_timer(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
