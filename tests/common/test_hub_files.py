"""What the process of a download does, over a stand-in for the hub."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import constants
from huggingface_hub.utils import close_session  # type: ignore[attr-defined]  # documented there

from common.download_messages import DownloadProgress, DownloadRequest, HubJob
from common.errors import Conflict, DiskFull, DownloadFailed, InvalidRequest, NotFound, ServerError, Unsupported
from common.hub_files import LOCK_NAME, HubDownload
from tests.hub import COMMIT, HubStandIn, Repo

REPO = "owner/name"
BLOCK = 1 << 20
BIG = random.Random(0).randbytes(3 * BLOCK + 5)
SMALL = {"config.json": b'{"a": 1}', "empty": b"", "sub/notes.txt": b"notes", ".gitattributes": b"*"}
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True, scope="module")
def closed_connections() -> Iterator[None]:
    yield
    close_session()


class Folder:
    """Where downloads go. The hidden folder is no model's, so `models` shows what a server would offer."""

    def __init__(self, root: Path, hub: HubStandIn) -> None:
        self.root = root / "models"
        self.hub = hub
        self.told: list[DownloadProgress] = []

    @property
    def staging(self) -> Path:
        return self.root / ".downloading-name"

    @property
    def destination(self) -> Path:
        return self.root / "name"

    def download(self, **asked: object) -> dict[str, bytes]:
        """The files that there are then."""
        self.told.clear()
        request = DownloadRequest(repo_id=REPO, **asked)  # type: ignore[arg-type]  # of its fields
        job = HubJob(asked=request, staging=str(self.staging), destination=str(self.destination))
        try:
            HubDownload(job, self.hub.url).run(self.told.append)
        finally:  # a process would end here
            for thread in threading.enumerate():
                if thread.name.startswith(ThreadPoolExecutor.__name__):
                    thread.join()
        return self.files()

    def files(self) -> dict[str, bytes]:
        paths = [path for path in self.root.rglob("*") if not path.is_dir()]
        assert not any(path.is_symlink() for path in paths)
        return {path.relative_to(self.destination).as_posix(): path.read_bytes() for path in paths}

    def nothing_visible(self) -> bool:
        return not self.root.exists() or all(path == self.staging for path in self.root.iterdir())


@pytest.fixture
def folder(tmp_path: Path, hub: HubStandIn) -> Folder:
    hub.repos[REPO] = Repo({**SMALL, WEIGHTS: BIG})
    return Folder(tmp_path, hub)


def test_all_files_come_and_nothing_else_stays(folder: Folder) -> None:
    assert folder.download(token="a-token") == folder.hub.repos[REPO].files
    asked = {request.path: request.authorization for request in folder.hub.asked}
    assert asked.pop(f"storage/{WEIGHTS}") is None  # another host gets no token
    assert set(asked.values()) == {"Bearer a-token"}
    assert len(folder.hub.asked) == len(SMALL) + 1  # the empty one need not be asked for, the large one is twice


def test_progress_grows_to_its_total(folder: Folder) -> None:
    folder.download()
    assert [report.bytes for report in folder.told] == sorted(report.bytes for report in folder.told)
    last = folder.told[-1]
    size = sum(len(content) for content in folder.hub.repos[REPO].files.values())
    assert (last.bytes, last.total, last.files_done, last.files_total) == (size, size, 5, 5)
    assert last.phase == "verifying"


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (("*.json",), (), {"config.json"}),
        (("*",), ("*.json", ".*", WEIGHTS), {"empty", "sub/notes.txt"}),
        (("sub/*", "empty"), (), {"empty", "sub/notes.txt"}),
        (("*.txt",), (), {"sub/notes.txt"}),  # a star also stands for slashes
    ],
)
def test_include_and_exclude(
    folder: Folder, include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]
) -> None:
    assert folder.download(include=include, exclude=exclude).keys() == expected
    assert {request.path for request in folder.hub.asked} <= expected


@pytest.mark.parametrize("patterns", [{"include": ("*.gguf",)}, {"exclude": ("*",)}, {"include": ()}])
def test_no_file_left_over_is_an_error(folder: Folder, patterns: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(InvalidRequest, match="no file that include and exclude leave over") as caught:
        folder.download(**patterns)
    assert caught.value.param == "include"
    assert not folder.root.exists()


def test_a_file_that_broke_off_goes_on_where_it_did(folder: Folder) -> None:
    folder.hub.faults[WEIGHTS] = ["cut", 503]
    with pytest.raises(DownloadFailed, match="answers with 503.* goes on from there"):
        folder.download()
    assert folder.nothing_visible()
    folder.hub.asked.clear()
    assert folder.download()[WEIGHTS] == BIG
    assert {(request.path, request.start) for request in folder.hub.asked} == {
        (WEIGHTS, BLOCK),
        (f"storage/{WEIGHTS}", BLOCK),
    }
    assert folder.told[0].bytes >= BLOCK


def test_what_the_repository_has_changed_meanwhile_is_not_mixed(folder: Folder) -> None:
    folder.hub.faults[WEIGHTS] = [500]
    with pytest.raises(DownloadFailed):
        folder.download(exclude=("empty",))
    changed = {"config.json": b'{"a": 2}', "sub/notes.txt": b"notes", WEIGHTS: BIG}
    folder.hub.repos[REPO] = Repo(changed, revisions={"main": "a" * 40})
    folder.hub.asked.clear()
    assert folder.download() == changed
    assert "sub/notes.txt" not in {request.path for request in folder.hub.asked}


def test_contents_that_two_files_share_come_once(folder: Folder) -> None:
    files = {"a/model.safetensors": BIG, "b.safetensors": BIG, "c.safetensors": BIG}
    folder.hub.repos[REPO] = Repo(files)
    assert folder.download() == files
    assert sum(folder.hub.sent.values()) == len(BIG)
    assert folder.told[-1].total == len(BIG)


@pytest.mark.parametrize("path", [WEIGHTS, "config.json"])
def test_a_file_with_another_hash_is_deleted(folder: Folder, path: str) -> None:
    repo = folder.hub.repos[REPO]
    right = repo.files[path]
    repo.files[path], repo.listed[path] = right[:-1] + b"?", right
    with pytest.raises(DownloadFailed, match=f"{path} .* another content than the hub says"):
        folder.download()
    assert folder.nothing_visible()
    repo.files[path] = right
    assert folder.download()[path] == right


def test_a_file_with_another_size_is_refused(folder: Folder) -> None:
    repo = folder.hub.repos[REPO]
    repo.listed["config.json"] = repo.files["config.json"] + b" "
    with pytest.raises(DownloadFailed, match="has broken off"):
        folder.download()
    assert folder.nothing_visible()


@pytest.mark.parametrize("path", [WEIGHTS, "config.json"])
def test_a_file_without_end_is_given_up(folder: Folder, path: str) -> None:
    folder.hub.faults[path] = ["endless"]
    with pytest.raises(DownloadFailed, match=f"{path} of {REPO} does not end where the hub says"):
        folder.download()
    assert folder.nothing_visible()
    assert folder.download() == folder.hub.repos[REPO].files


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../evil",
            "a/../../evil",
            "/etc/evil",
            "a//b",
            "C:/evil",
            "a\\..\\evil",
            "..",
            "sub/con.txt",
            "a/.",
            "new\nline",
        ),
        *("a/" + 256 * "b", 500 * "ab/" + "c"),
    ],
)
def test_names_that_lead_out_or_are_too_long_are_refused(folder: Folder, path: str) -> None:
    folder.hub.repos[REPO] = Repo({**SMALL, path: b"evil"})
    with pytest.raises(InvalidRequest, match="a name that files cannot have everywhere") as caught:
        folder.download()
    assert caught.value.param == "exclude"
    assert not folder.root.exists()
    assert folder.download(exclude=(path,)) == SMALL


@pytest.mark.parametrize("path", ["Config.JSON", "sub", "SUB/notes.txt", "empty/file"])
def test_names_that_are_one_on_some_systems_are_refused(folder: Folder, path: str) -> None:
    folder.hub.repos[REPO] = Repo({**SMALL, path: b"other"})
    with pytest.raises(InvalidRequest, match="something else of that name"):
        folder.download()
    assert not folder.root.exists()
    assert folder.download(exclude=(path,)) == SMALL


@pytest.mark.parametrize("digest", ["../../evil", "", "f" * 41])
def test_hashes_that_are_none_are_refused(folder: Folder, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sibling = Repo.sibling
    monkeypatch.setattr(Repo, "sibling", lambda repo, path: sibling(repo, path) | {"blobId": digest})
    with pytest.raises(DownloadFailed, match="does not list the files .* HF_ENDPOINT"):
        folder.download()
    assert not folder.root.exists()


def missing(hub: HubStandIn) -> None:
    hub.repos.clear()


def private(hub: HubStandIn) -> None:
    hub.repos[REPO].token = "right"


def gated(hub: HubStandIn) -> None:
    hub.repos[REPO].gated = "right"


def answering(status: int) -> Callable[[HubStandIn], None]:
    return lambda hub: setattr(hub, "status", status)


@pytest.mark.parametrize(
    ("change", "asked", "error", "param", "message"),
    [
        (missing, {}, NotFound, "repo_id", "There is no model owner/name .* HF_TOKEN"),
        (missing, {"token": "t"}, NotFound, "repo_id", "There is no model owner/name"),
        (private, {}, NotFound, "repo_id", "or it is private"),
        (private, {"token": "wrong"}, NotFound, "repo_id", "or it is private"),
        (gated, {}, InvalidRequest, "token", "is gated: accept its terms"),
        (gated, {"token": "wrong"}, InvalidRequest, "token", "is gated: accept its terms"),
        (None, {"revision": "dev"}, NotFound, "revision", "no revision 'dev'"),
        (answering(403), {}, InvalidRequest, "token", r"does not take the token .*\(403\)"),
        (answering(500), {}, DownloadFailed, None, "answers with 500"),
        (answering(200), {}, DownloadFailed, None, "does not list the files"),
    ],
)
def test_what_the_hub_refuses_is_told_with_its_remedy(
    folder: Folder,
    change: Callable[[HubStandIn], None] | None,
    asked: dict[str, str],
    error: type[ServerError],
    param: str | None,
    message: str,
) -> None:
    if change is not None:
        change(folder.hub)
    with pytest.raises(error, match=message) as caught:
        folder.download(**asked)
    assert (type(caught.value), caught.value.param) == (error, param)
    assert folder.nothing_visible()


@pytest.mark.parametrize("change", [private, gated])
def test_a_token_opens_what_needs_one(folder: Folder, change: Callable[[HubStandIn], None]) -> None:
    change(folder.hub)
    assert folder.download(token="right", exclude=(WEIGHTS,)) == SMALL


def test_a_revision_is_downloaded(folder: Folder) -> None:
    folder.hub.repos[REPO].revisions = {"main": "a" * 40, "refs/pr/1": COMMIT}
    assert folder.download(revision="refs/pr/1", include=("config.json",)).keys() == {"config.json"}


@pytest.mark.parametrize("name", ["datasets/owner/name", "owner/name.git", "ow ner/name", "..", "a--b/c"])
def test_names_of_no_repository(tmp_path: Path, hub: HubStandIn, name: str) -> None:
    job = HubJob(asked=DownloadRequest(repo_id=name), staging=str(tmp_path / "s"), destination=str(tmp_path / "d"))
    with pytest.raises(InvalidRequest, match="names no repository") as caught:
        HubDownload(job, hub.url).run(print)
    assert caught.value.param == "repo_id"


def test_a_hub_that_cannot_be_reached(folder: Folder, tmp_path: Path) -> None:
    asked = DownloadRequest(repo_id=REPO)
    job = HubJob(asked=asked, staging=str(folder.staging), destination=str(folder.destination))
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        HubDownload(job, "http://127.0.0.1:9").run(print)


def test_offline_mode_is_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE is set"):
        folder.download()


def test_space_is_looked_for_before_anything_comes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(len(BIG)))
    with pytest.raises(DiskFull, match=r"needs 0\.0 GB more, and models has 0\.0 GB left"):
        folder.download()
    assert folder.hub.asked == []
    assert folder.download(include=(WEIGHTS,)) == {WEIGHTS: BIG}


def test_a_disk_that_is_full_after_all(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFull, match="Free some space"):
        folder.download()
    assert folder.nothing_visible()


def test_a_folder_that_cannot_get_its_name_keeps_its_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(ServerError, match="cannot be written: Permission denied"):
            folder.download()
    assert folder.nothing_visible()
    folder.hub.asked.clear()
    assert folder.download() == folder.hub.repos[REPO].files
    assert folder.hub.asked == []


def test_files_that_the_hub_does_not_send_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(BIG) - 1)
    with pytest.raises(Unsupported, match="hf download owner/name --local-dir"):
        folder.download()


def test_a_folder_that_is_there_is_left_alone(folder: Folder) -> None:
    folder.destination.mkdir(parents=True)
    with pytest.raises(Conflict, match="name exists already"):
        folder.download()
    assert list(folder.destination.iterdir()) == []


def test_two_processes_do_not_share_a_folder(folder: Folder) -> None:
    folder.staging.mkdir(parents=True)
    with (
        FileLock(folder.staging / LOCK_NAME),
        pytest.raises(Conflict, match="Another process is downloading to name"),
    ):
        folder.download()
    assert folder.download(include=("empty",)) == {"empty": b""}
