"""Downloads of models from the Hugging Face Hub: which run, how far they are, and how they end.

Each is a process of its own, see `common.hub_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import re
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
from loguru import logger

from common.config_models import Settings
from common.download_messages import (
    DownloadDone,
    DownloadError,
    DownloadPhase,
    DownloadProgress,
    DownloadRequest,
    FromDownload,
    HubJob,
    RepoType,
)
from common.errors import (
    Conflict,
    DownloadFailed,
    InvalidRequest,
    NotFound,
    RequestCancelled,
    ServerError,
    TooManyRequests,
)
from common.names import is_plain_name

DownloadState: TypeAlias = DownloadPhase | Literal["finished", "failed"]

PROJECT_ROOT: Final = Path(__file__).resolve().parent.parent
MAX_RUNNING: Final = 4
MAX_ENDED: Final = 100  # that are still listed
# Names for as long as they are not complete. Of 255 bytes that a name may have, some are left for this.
STAGING_PREFIX: Final = ".downloading-"
_MAX_NAME_BYTES: Final = 200
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_decoder: Final = msgspec.json.Decoder(FromDownload)


def download_folders(settings: Settings) -> dict[RepoType, Path]:
    """Where each kind of repository goes."""
    return {
        "model": Path(settings.model.model_dir),
        "lora": Path(settings.lora.lora_dir),
        "draft": Path(settings.draft_model.draft_model_dir),
        "embedding": Path(settings.embeddings.embedding_model_dir),
    }


class Download:
    """A download, from its start on.

    What it has fetched is kept where it ends early.

    Attributes:
        asked: what is downloaded.
        destination: the folder that is there in the end, and not before.
        progress: how far it is.
        error: why it has ended early; None before its end, and after a good one.
    """

    def __init__(self, asked: DownloadRequest, destination: Path) -> None:
        self.asked = asked
        self.destination = destination
        self.progress = DownloadProgress()
        self.error: ServerError | None = None
        self._changed = asyncio.Event()
        self._stopped = False
        # It may outlive the request that begins it, so it must not carry that request's id into the log.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def state(self) -> DownloadState:
        if self.running:
            return self.progress.phase
        return "finished" if self.error is None else "failed"

    async def follow(self) -> AsyncIterator[DownloadProgress]:
        """How far it is, at once and whenever that changes. Whoever is slow misses what lies between.

        Raises:
            ServerError: it ends early.
        """
        while self.running:
            changed = self._changed
            yield self.progress
            await changed.wait()
        await self.result()

    async def result(self) -> Path:
        """Wait for the end; the folder. Raises the `ServerError` that it ends early with."""
        await asyncio.wait({self._task})
        if self.error is not None:
            raise self.error
        return self.destination

    async def stop(self, reason: ServerError) -> None:
        """End it, and wait for that; harmless after its end.

        Args:
            reason: what those are told who wait for it.
        """
        if self.running and not self._stopped:
            self._stopped = True
            self.error = reason
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        what = f"{self.asked.repo_id} to {self.destination}"
        logger.info("Downloading {}", what)
        try:
            async with asyncio.timeout(self.asked.timeout):
                await self._fetch()
        except TimeoutError:
            self.error = DownloadFailed(
                f"The download of {self.asked.repo_id} took longer than its timeout of {self.asked.timeout:g} s. What "
                "has come is kept; the same request goes on from there."
            )
        except ServerError as error:
            self.error = error
        except asyncio.CancelledError:  # by stop(), or with the event loop
            self.error = self.error or RequestCancelled("The server is shutting down.")
        except Exception:
            logger.exception("A download has failed for a reason that the server does not know")
            self.error = ServerError(f"The download of {self.asked.repo_id} failed; the server's log says more.")
        finally:
            self._tell()
        if self.error is None:
            logger.success("Downloaded {}", what)
        else:
            logger.info("Not downloaded: {}: {}", what, self.error.message)

    async def _fetch(self) -> None:
        job = HubJob(
            asked=self.asked,
            staging=str(staging_folder(self.destination).absolute()),
            destination=str(self.destination.absolute()),
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "common.hub_files"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=PROJECT_ROOT,
            env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"},
        )
        assert process.stdin is not None
        assert process.stderr is not None
        printed = asyncio.create_task(process.stderr.read())
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            if not await self._listen(process):
                logger.error("The process of a download has failed:\n{}", (await printed).decode("utf-8", "replace"))
                raise ServerError(
                    f"The process that downloads {self.asked.repo_id} ended with code {await process.wait()}. The log "
                    "says more; what has come is kept."
                )
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.gather(process.wait(), printed)

    async def _listen(self, process: Process) -> bool:
        """Follow what the process tells; whether it has said that it is done."""
        assert process.stdout is not None
        async for line in process.stdout:
            match _decoder.decode(line):
                case DownloadProgress() as progress:
                    self.progress = progress
                    self._tell()
                case DownloadError(error):
                    raise ServerError.from_record(error)
                case DownloadDone():
                    return True
        return False

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Downloads:
    """The downloads of a server, those that have ended lately included.

    Args:
        folders: where each kind of repository goes.
    """

    def __init__(self, folders: Mapping[RepoType, Path]) -> None:
        self._folders = folders
        self._downloads: dict[Path, Download] = {}  # by destination
        self._changing = asyncio.Lock()

    def __iter__(self) -> Iterator[Download]:
        """In the order in which they began."""
        return iter(list(self._downloads.values()))

    async def start(self, asked: DownloadRequest) -> Download:
        """Begin a download, or go on with one that has ended early.

        Raises:
            InvalidRequest: it names no new folder.
            TooManyRequests: there are others that have to end first.
        """
        async with self._changing:
            destination = self._new_destination(asked)
            if sum(download.running for download in self._downloads.values()) >= MAX_RUNNING:
                raise TooManyRequests(f"{MAX_RUNNING} downloads are running; wait for one to end, or cancel one.")
            self._downloads.pop(destination, None)
            self._forget_oldest()
            self._downloads[destination] = Download(asked, destination)
            return self._downloads[destination]

    async def cancel(self, repo_type: RepoType, folder_name: str) -> None:
        """End a download and remove what has come of it, also where it has ended early before. Models stay.

        Raises:
            InvalidRequest: not the name of a folder.
            NotFound: there is nothing of such a download.
        """
        async with self._changing:
            destination = self._destination(repo_type, folder_name, "folder_name")
            download = self._downloads.pop(destination, None)
            if download is not None:
                await download.stop(Conflict(f"The download to {folder_name} was cancelled."))
            if not await asyncio.to_thread(_remove, staging_folder(destination)) and download is None:
                raise NotFound(f"Nothing is being downloaded to {folder_name!r}; /v1/downloads lists what is.")

    async def close(self) -> None:
        """End all that run; what has come of them is kept."""
        reason = RequestCancelled("The server is shutting down. What has come is kept; the same request goes on there.")
        await asyncio.gather(*(download.stop(reason) for download in self._downloads.values()))

    def _new_destination(self, asked: DownloadRequest) -> Path:
        for param in ("repo_id", "revision", "token", "include", "exclude"):
            value = getattr(asked, param)
            for text in value if isinstance(value, tuple) else [value or ""]:
                if not text.isprintable():
                    raise InvalidRequest(f"{param} holds characters that are none.", param=param)
        if asked.token is not None and not _TOKEN.fullmatch(asked.token):
            raise InvalidRequest("token is no token: those are letters and digits.", param="token")
        given = asked.folder_name is not None
        name = asked.folder_name if asked.folder_name is not None else asked.repo_id.rpartition("/")[2]
        destination = self._destination(asked.repo_type, name, "folder_name" if given else "repo_id")
        if destination in self._downloads and self._downloads[destination].running:
            raise Conflict(f"{name} is being downloaded; /v1/downloads says how far it is.", param="folder_name")
        if os.path.lexists(destination):
            raise Conflict(
                f"{name} exists already in {destination.parent}. Delete that folder, or give another folder_name.",
                param="folder_name",
            )
        return destination

    def _destination(self, repo_type: RepoType, name: str, param: str) -> Path:
        if not is_plain_name(name) or name.startswith(".") or len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise InvalidRequest(
                f"{name!r} is no name for a new folder. Give one without slashes that begins with no dot, as "
                "folder_name.",
                param=param,
            )
        return self._folders[repo_type] / name

    def _forget_oldest(self) -> None:
        ended = [destination for destination, download in self._downloads.items() if not download.running]
        for destination in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
            del self._downloads[destination]


def staging_folder(destination: Path) -> Path:
    """Where the files of a download are until it is complete."""
    return destination.with_name(STAGING_PREFIX + destination.name)


def _remove(folder: Path) -> bool:
    """Whether there was such a folder."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("{} cannot be removed: {}", folder, error.strerror)
    return True
