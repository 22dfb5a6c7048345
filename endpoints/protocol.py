"""HTTP below the application: what is no request is refused, and a connection that does not get on is closed."""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any, Final

import h11
from loguru import logger
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.config_models import NetworkConfig
from common.errors import InvalidRequest
from endpoints.errors import core_error, dump_json

MAX_HEADER_BYTES: Final = 64 * 1024  # of request line and headers together, while they arrive

_EXPLANATIONS: Final = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"The headers are larger than {MAX_HEADER_BYTES // 1024} KB.",
    HTTPStatus.NOT_IMPLEMENTED: "The only Transfer-Encoding that the server knows is chunked.",
}


class HttpProtocol(H11Protocol):
    """uvicorn's own, which tells clients in the API's envelope what it cannot read, and holds nothing back.

    Its clients have a limited time for the head of a request, and for reading what is sent: uvicorn itself only closes
    connections between two requests. How long a body may take is told in the envelope of the route's API, see
    `BodyTimeoutMiddleware`.
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
        # asyncio does so itself for sockets that name their protocol, as those of create_server() do not. Otherwise
        # each answer's body, and each token, waits 40 ms for the client to acknowledge what came before it.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: an upgrade is an offer, as some clients make with each request (h2c), and never taken."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            hint = HTTPStatus(getattr(sys.exc_info()[1], "error_status_hint", HTTPStatus.BAD_REQUEST))
            explanation = _EXPLANATIONS.get(hint, "This is no HTTP request that the server can read.")
            # 5xx is for what the server gets wrong.
            status = HTTPStatus.BAD_REQUEST if hint is HTTPStatus.NOT_IMPLEMENTED else hint
            with_body = self.conn.our_state is h11.IDLE or self.scope["method"] != "HEAD"
            body = dump_json(core_error(InvalidRequest(explanation))).encode()
            headers = [
                ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")
            ]  # fmt: skip
            response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            for event in (response, *([h11.Data(data=body)] if with_body else []), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # As when a connection is lost: what the application still answers goes nowhere.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
