"""HTTP below the application: what is no HTTP request is refused here."""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidRequest
from endpoints.errors import core_error, dump_json

MAX_HEADER_BYTES: Final = 64 * 1024  # of request line and headers together, while they arrive

_EXPLANATIONS: Final = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"The headers are larger than {MAX_HEADER_BYTES // 1024} KB.",
    HTTPStatus.NOT_IMPLEMENTED: "The only Transfer-Encoding that the server knows is chunked.",
}


class HttpProtocol(H11Protocol):
    """uvicorn's own, which tells clients in the API's envelope what it cannot read, and holds nothing back."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        # asyncio does so itself for sockets that name their protocol, as those of create_server() do not. Otherwise
        # each answer's body, and each token, waits 40 ms for the client to acknowledge what came before it.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
