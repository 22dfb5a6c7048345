"""Bodies of the download routes, and what the server says about downloads."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from common.download_messages import DownloadProgress, DownloadRequest, RepoType
from common.downloader import Download, DownloadState
from common.limits import MAX_PATTERNS, ShortText, at_most
from common.sampling import RequestModel

_Patterns: TypeAlias = Annotated[list[ShortText], at_most(MAX_PATTERNS)]


class DownloadBody(RequestModel):
    """Body of `POST /v1/download`."""

    repo_id: ShortText = Field(description="Repository on the hub, as owner/name.")
    repo_type: RepoType = Field(
        "model",
        description="Whose folder the files go to: model (model_dir), lora (lora_dir), draft (draft_model_dir) or "
        "embedding (embedding_model_dir).",
    )
    folder_name: ShortText | None = Field(
        None, description="Name of the new folder. Default: the repository's, without its owner."
    )
    revision: ShortText | None = Field(None, description="Branch, tag or commit. Default: the main branch.")
    token: ShortText | None = Field(
        None, description="For private and gated repositories. Default: HF_TOKEN where the server was started."
    )
    include: _Patterns = Field(["*"], description="Only files whose path matches one of these, as in *.json.")
    exclude: _Patterns = Field([], description="And none of these.")
    chunk_limit: int | None = Field(None, description="Taken from TabbyAPI's bodies, without effect.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds that all of it may take. Default: as long as it takes."
    )
    stream: bool = Field(
        False, description="Tell the progress as server-sent events. Also where the header Accept asks for them."
    )
    detach: bool = Field(
        False, description="Answer at once with 202; the download goes on by itself, and /v1/downloads tells of it."
    )

    def request(self) -> DownloadRequest:
        return DownloadRequest(
            repo_id=self.repo_id,
            repo_type=self.repo_type,
            folder_name=self.folder_name,
            revision=self.revision,
            token=self.token,
            include=tuple(self.include),
            exclude=tuple(self.exclude),
            timeout=self.timeout,
        )


class DownloadAnswer(BaseModel):
    download_path: str = Field(description="The new folder.")


class DownloadEvent(BaseModel):
    """How far a download is. Zeroes until the files are listed."""

    model_config = ConfigDict(from_attributes=True)

    phase: Literal["starting", "downloading", "verifying"]
    file: str | None = Field(description="Path in the repository of the file that something came of last.")
    file_bytes: int = Field(description="That are there of it.")
    file_total: int
    files_done: int = Field(description="That are there and verified.")
    files_total: int
    bytes: int = Field(description="That are there of all files, those from an earlier attempt included.")
    total: int

    @classmethod
    def of(cls, progress: DownloadProgress) -> Self:
        return cls.model_validate(progress)


class DownloadCard(BaseModel):
    """A download that runs, or has ended."""

    id: str = Field(description="repo_type/folder_name, as the route that cancels it takes them.")
    repo_id: str
    revision: str | None
    state: DownloadState = Field(description="failed: it has ended early; what has come is kept.")
    error: str | None = Field(description="Why it has failed.")
    download_path: str = Field(description="The folder, there once state is finished.")
    progress: DownloadEvent

    @classmethod
    def of(cls, download: Download) -> Self:
        asked = download.asked
        return cls(
            id=f"{asked.repo_type}/{download.destination.name}",
            repo_id=asked.repo_id,
            revision=asked.revision,
            state=download.state,
            error=download.error.message if download.error is not None else None,
            download_path=str(download.destination),
            progress=DownloadEvent.of(download.progress),
        )


class DownloadList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DownloadCard]
