"""Downloads as the server knows them. What it answers about them is in tests/endpoints/core/test_download.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common import downloader
from common.config_models import Settings
from common.download_messages import DownloadProgress, DownloadRequest
from common.downloader import Downloads, download_folders
from common.errors import DownloadFailed, RequestCancelled, ServerError
from tests.hub import HubStandIn, Repo

REPO = "owner/name"


def downloads_to(folder: Path) -> Downloads:
    return Downloads({"model": folder, "lora": folder, "draft": folder, "embedding": folder})


async def followed(download: downloader.Download) -> tuple[list[DownloadProgress], ServerError | None]:
    """What is told until the end, and how that is."""
    told: list[DownloadProgress] = []
    try:
        async for progress in download.follow():
            told.append(progress)
    except ServerError as error:
        return told, error
    return told, None


def test_each_type_has_the_folder_of_its_setting() -> None:
    settings = Settings.model_validate(
        {
            "model": {"model_dir": "m"},
            "lora": {"lora_dir": "l"},
            "draft_model": {"draft_model_dir": "d"},
            "embeddings": {"embedding_model_dir": "e"},
        }
    )
    assert download_folders(settings) == {
        "model": Path("m"),
        "lora": Path("l"),
        "draft": Path("d"),
        "embedding": Path("e"),
    }


@pytest.mark.anyio
async def test_who_stops_first_says_why_and_everybody_is_told(tmp_path: Path, hub: HubStandIn) -> None:
    hub.repos[REPO] = Repo({"model.safetensors": bytes(1 << 20)})
    hub.faults["model.safetensors"] = ["stall"]
    downloads = downloads_to(tmp_path)
    download = await downloads.start(DownloadRequest(repo_id=REPO))
    following = [asyncio.create_task(followed(download)) for _ in range(2)]
    await asyncio.to_thread(hub.stalled.wait, 60)
    gone = RequestCancelled("gone")
    await asyncio.gather(download.stop(gone), download.stop(DownloadFailed("later")), downloads.close())
    for told, error in await asyncio.gather(*following):
        assert told[0] == DownloadProgress()
        assert error is gone
    assert not download.running
    await download.stop(DownloadFailed("after the end"))
    with pytest.raises(RequestCancelled, match="gone"):
        await download.result()


@pytest.mark.anyio
async def test_those_that_ended_first_are_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloader, "PROJECT_ROOT", tmp_path)  # where no download can begin
    monkeypatch.setattr(downloader, "MAX_ENDED", 2)
    downloads = downloads_to(tmp_path)
    for name in ("a", "b", "a", "c"):
        download = await downloads.start(DownloadRequest(repo_id=REPO, folder_name=name))
        await followed(download)
    assert [download.destination.name for download in downloads] == ["a", "c"]


@pytest.mark.anyio
async def test_a_process_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloader, "PROJECT_ROOT", tmp_path / "none")
    download = await downloads_to(tmp_path).start(DownloadRequest(repo_id=REPO))
    _, error = await followed(download)
    assert error is not None
    assert "failed; the server's log says more" in error.message
    assert download.state == "failed"
