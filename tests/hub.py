"""A stand-in for the Hugging Face Hub on 127.0.0.1, as far as a download uses it, with faults on request."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Files from here on are in the large file storage, so that they come from another host and have a SHA-256.
LARGE_BYTES = 1000
_PART_BYTES = 1 << 18

# What happens once half of a file has been sent: the connection is cut, or nothing more comes until `resume()`. Or the
# file is sent without its length, over and over, or the request for it is answered with that status.
Fault: TypeAlias = Literal["cut", "stall", "endless"] | int


class Asked(NamedTuple):
    """A request.

    Attributes:
        start: of the bytes that are asked for.
    """

    path: str
    start: int
    authorization: str | None


@dataclass
class Repo:
    """
    Attributes:
        files: by path.
        listed: where the hub lists another content than it sends.
        token: without which the repository is not there for anybody.
        gated: without which it is listed, but not sent.
    """

    files: dict[str, bytes]
    listed: dict[str, bytes] = field(default_factory=dict)
    token: str | None = None
    gated: str | None = None
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT})

    def sibling(self, path: str) -> dict[str, object]:
        content = self.listed.get(path, self.files[path])
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git}
        if len(content) >= LARGE_BYTES:
            sha256 = hashlib.sha256(content).hexdigest()
            entry |= {"blobId": "f" * 40, "lfs": {"sha256": sha256, "size": len(content), "pointerSize": 130}}
        return entry


class HubStandIn:
    """
    Attributes:
        repos: by owner/name. May be changed while it runs.
        faults: by path of a file; each happens once, in this order.
        asked: the requests for files, those of the large file storage under the address that they are redirected to.
        sent: bytes of each file.
        status: of every answer, instead of one.
        stalled: a file that stalls has been sent by half.
    """

    def __init__(self) -> None:
        self.reset()
        self._sockets = [_listener() for _ in range(2)]
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), log_config=None, ws="none", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(self._sockets)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"

    @property
    def storage(self) -> str:
        """Where large files are, another origin."""
        return f"http://127.0.0.1:{self._sockets[1].getsockname()[1]}"

    def reset(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        self.status: int | None = None
        self.stalled = threading.Event()
        self._resumed = threading.Event()

    def resume(self) -> None:
        """Let stalled files go on."""
        self._resumed.set()

    @contextmanager
    def running(self) -> Iterator[HubStandIn]:
        self._thread.start()
        try:
            yield self
        finally:
            self.resume()
            self._server.should_exit = True
            self._thread.join(30)
            assert not self._thread.is_alive()
            for listener in self._sockets:
                listener.close()

    # --- routes ---------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/models/{repo:path}/revision/{revision:path}", self._info),
                Route("/api/models/{repo:path}", self._info),
                Route("/storage/{repo:path}/at/{path:path}", self._stored),
                Route("/{repo:path}/resolve/{commit}/{path:path}", self._resolve),
            ]
        )

    def _repo(self, request: Request) -> Repo | Response:
        if self.status is not None:
            return Response(status_code=self.status)
        repo = self.repos.get(request.path_params["repo"])
        allowed = repo is not None and repo.token in (None, _token(request))
        return repo if repo is not None and allowed else _refused(404 if _token(request) else 401, "RepoNotFound")

    async def _info(self, request: Request) -> Response:
        repo = self._repo(request)
        if isinstance(repo, Response):
            return repo
        revision = request.path_params.get("revision", "main")
        commit = repo.revisions.get(revision)
        if commit is None:
            return _refused(404, "RevisionNotFound")
        siblings = [repo.sibling(path) for path in repo.files]
        assert request.query_params["blobs"].lower() == "true"
        return JSONResponse({"id": request.path_params["repo"], "sha": commit, "siblings": siblings})

    async def _resolve(self, request: Request) -> Response:
        repo, path = self._repo(request), request.path_params["path"]
        if isinstance(repo, Response):
            return repo
        self.asked.append(Asked(path, _start(request), request.headers.get("authorization")))
        if request.path_params["commit"] not in repo.revisions.values() or path not in repo.files:
            return _refused(404, "EntryNotFound")
        if repo.gated not in (None, _token(request)):
            return _refused(403 if _token(request) else 401, "GatedRepo")
        if len(repo.files[path]) >= LARGE_BYTES:
            return RedirectResponse(f"{self.storage}/storage/{request.path_params['repo']}/at/{path}", 302)
        return self._file(request, path, repo.files[path])

    async def _stored(self, request: Request) -> Response:
        path = request.path_params["path"]
        self.asked.append(Asked(f"storage/{path}", _start(request), request.headers.get("authorization")))
        return self._file(request, path, self.repos[request.path_params["repo"]].files[path])

    def _file(self, request: Request, path: str, content: bytes) -> Response:
        fault = self.faults[path].pop(0) if self.faults.get(path) else None
        if isinstance(fault, int):
            return Response(status_code=fault)
        if fault == "endless":
            return StreamingResponse(itertools.repeat(content + bytes(_PART_BYTES)))
        start = _start(request)
        headers = {"Content-Length": str(len(content) - start), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return StreamingResponse(self._send(path, content, start, fault), 206 if start else 200, headers)

    async def _send(self, path: str, content: bytes, start: int, fault: Fault | None) -> AsyncIterator[bytes]:
        half = (start + len(content)) // 2
        for end in [half, len(content)] if fault else [len(content)]:
            while start < end:
                part = content[start : min(start + _PART_BYTES, end)]
                yield part
                start += len(part)
                self.sent[path] = self.sent.get(path, 0) + len(part)
            if fault == "cut" and end == half:
                raise ConnectionResetError
            if fault == "stall" and end == half:
                resumed = self._resumed
                self.stalled.set()
                while not resumed.is_set():
                    await asyncio.sleep(0.01)


def _listener() -> socket.socket:
    # With its protocol named, unlike those of create_server(): see HttpProtocol of the server.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else None


def _start(request: Request) -> int:
    wanted = request.headers.get("range", "bytes=0-")
    return int(wanted.removeprefix("bytes=").removesuffix("-"))


def _refused(status: int, code: str) -> Response:
    return Response(status_code=status, headers={"X-Error-Code": code})
