"""What is asked of a download, and what its process tells."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from common.errors import ErrorRecord

RepoType: TypeAlias = Literal["model", "lora", "draft", "embedding"]


class DownloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which files of a repository are wanted, and as what.

    Attributes:
        repo_id: owner/name.
        repo_type: says whose folder the files go to.
        folder_name: of the new folder in it; None for the repository's own name.
        revision: branch, tag or commit; None for the default branch.
        token: for the hub; None for the one that the server's user has (HF_TOKEN, or a login with hf).
        include: patterns of which a path in the repository has to match one, as fnmatch reads them.
        exclude: patterns of which it must match none.
        timeout: seconds for all of it; None for as long as it takes.
    """

    repo_id: str
    repo_type: RepoType = "model"
    folder_name: str | None = None
    revision: str | None = None
    token: str | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    timeout: float | None = None


class HubJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a download is told, which is all that it is told.

    Attributes:
        asked: whose files.
        staging: absolute path of the folder that holds what has come so far.
        destination: absolute path of the folder that is made of it.
    """

    asked: DownloadRequest
    staging: str
    destination: str


# "starting": until the files are listed; "verifying": all bytes are there.
DownloadPhase: TypeAlias = Literal["starting", "downloading", "verifying"]


class DownloadProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a download is. Zeroes until the files are listed.

    Attributes:
        file: path in the repository of the file that it was busy with last.
        file_bytes: that are there of it.
        files_done: that are there and verified.
        bytes: that are there of all files, those from an earlier attempt included.
    """

    phase: DownloadPhase = "starting"
    file: str | None = None
    file_bytes: int = 0
    file_total: int = 0
    files_done: int = 0
    files_total: int = 0
    bytes: int = 0
    total: int = 0


class DownloadDone(msgspec.Struct, frozen=True, tag="done"):
    """The folder is there, complete and verified."""


class DownloadError(msgspec.Struct, frozen=True, tag="error"):
    error: ErrorRecord


FromDownload: TypeAlias = DownloadProgress | DownloadDone | DownloadError
