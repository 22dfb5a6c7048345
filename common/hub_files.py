"""Files of a repository on the Hugging Face Hub, fetched and verified: the process of a download.

`python -m common.hub_files` reads one `HubJob` as a line of JSON, tells in such lines how it gets on, and ends as soon
as its input does. It is a process of its own so that a cancel ends it whatever it is busy with, and so that the server
need not hold the hub's client.

Until all of them are there, files lie in a hidden folder under their hashes, so that no part of a model is taken for
one, that a later attempt goes on where the last one ended although the repository has changed since, and that the
names in a repository mean nothing before they have been checked. Then the model's folder appears as a whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast

import httpx2
import msgspec
from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# hf_hub_download() begins a file that has broken off anew; this is the function below it, which does not.
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there, but not marked as exported
    build_hf_headers,
    filter_repo_objects,
)

from common.download_messages import (
    DownloadDone,
    DownloadError,
    DownloadProgress,
    DownloadRequest,
    FromDownload,
    HubJob,
)
from common.errors import Conflict, DiskFull, DownloadFailed, InvalidRequest, NotFound, ServerError, Unsupported
from common.names import path_within
from common.version import VERSION

Report: TypeAlias = Callable[[DownloadProgress], None]

PARALLEL_FILES: Final = 4
REPORT_SECONDS: Final = 0.25
LOCK_NAME: Final = "lock"
_ASSEMBLED: Final = "files"
_PARTIAL: Final = ".incomplete"
_BLOCK_BYTES: Final = 1 << 20
_SHA256_DIGITS: Final = 64
_GO_ON: Final = "What has come is kept; the same request goes on from there."
# Of a name, and of a path in a repository, which has a folder before it: what every system takes.
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 1000
_LONGEST_SHOWN: Final = 100  # characters of a path
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")

# What breaks off costs less than a block, and the progress moves on a slow line too. The client's own is 10 MB.
constants.DOWNLOAD_CHUNK_SIZE = _BLOCK_BYTES


class HubFile(msgspec.Struct, frozen=True):
    """A file of a repository.

    Attributes:
        path: in the repository, with slashes.
        digest: SHA-256 of files in the repository's large file storage, of others the SHA-1 that git gives them.
    """

    path: str
    size: int
    digest: str

    def is_that_of(self, path: Path) -> bool:
        """Whether the digest is that of a file."""
        with open(path, "rb") as file:
            if len(self.digest) == _SHA256_DIGITS:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.digest
            git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: git).hexdigest() == self.digest


class HubDownload:
    """Fetches what a job asks for.

    Args:
        endpoint: of the hub.
    """

    def __init__(self, job: HubJob, endpoint: str = constants.ENDPOINT) -> None:
        self._asked = job.asked
        self._staging = Path(job.staging)
        self._destination = Path(job.destination)
        self._endpoint = endpoint
        # As the files are stored: where they were compressed, no position in them could be asked for.
        self._headers = build_hf_headers(token=job.asked.token, library_name="waypoint", library_version=VERSION) | {
            "Accept-Encoding": "identity"
        }

    def run(self, report: Report) -> None:
        """Make the folder, or leave what has come of it for another attempt.

        Raises:
            ServerError: the reason.
        """
        with _errors_told(self._asked, self._endpoint):
            commit, files = self._list_files()
            self._staging.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._discard_others(files)
                # One for each content.
                wanted = list({file.digest: file for file in files}.values())
                self._check_space(files, wanted)
                self._fetch_all(commit, wanted, report)
                self._assemble(files)
            # Whatever cannot be removed, the model is there.
            shutil.rmtree(self._staging, ignore_errors=True)

    # --- before ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with FileLock(self._staging / LOCK_NAME, timeout=0):
                if os.path.lexists(self._destination):
                    raise Conflict(f"{self._destination.name} exists already.", param="folder_name")
                yield
        except Timeout as error:
            raise Conflict(
                f"Another process is downloading to {self._destination.name}; wait for it, or end it.",
                param="folder_name",
            ) from error

    def _list_files(self) -> tuple[str, list[HubFile]]:
        """The commit that the revision stands for at present, and those of its files that are asked for."""
        asked = self._asked
        try:
            info = HfApi(endpoint=self._endpoint, token=asked.token).model_info(
                asked.repo_id, revision=asked.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True
            )
        except (HFValidationError, HfHubHTTPError):
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise self._not_a_hub() from error
        files = list(
            filter_repo_objects(
                info.siblings or [],
                allow_patterns=list(asked.include),
                ignore_patterns=list(asked.exclude),
                key=lambda sibling: sibling.rfilename,
            )
        )
        if not files:
            raise InvalidRequest(
                f"{asked.repo_id} has no file that include and exclude leave over. Change them, or leave them out.",
                param="include",
            )
        if info.sha is None:
            raise self._not_a_hub()
        checked = [self._checked(file) for file in files]
        self._check_names(checked)
        return info.sha, checked

    def _checked(self, file: RepoSibling) -> HubFile:
        path, size = file.rfilename, file.size
        sizes = [len(name.encode("utf-8", "replace")) for name in (path, *path.split("/"))]
        too_long = sizes[0] > _MAX_PATH_BYTES or max(sizes[1:]) > _MAX_NAME_BYTES
        if too_long or path_within(self._destination, path) is None:
            raise InvalidRequest(
                f"{self._asked.repo_id} has a file {path[:_LONGEST_SHOWN]!r}, a name that files cannot have "
                "everywhere. Leave it out with exclude.",
                param="exclude",
            )
        digest = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if size is None or digest is None or not _DIGEST.fullmatch(digest):
            raise self._not_a_hub()
        if size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise Unsupported(
                f"{path} has {_gigabytes(size)}, and the hub sends no more than "
                f"{_gigabytes(constants.MAX_HTTP_DOWNLOAD_SIZE)} in a way that can be resumed. Use `hf download "
                f"{self._asked.repo_id} --local-dir` with a folder in {self._destination.parent.name}.",
                param="repo_id",
            )
        return HubFile(path, size, digest)

    def _check_names(self, files: Sequence[HubFile]) -> None:
        """Raise InvalidRequest where a file would take the place of another; many systems know no capital letters."""
        folders = {folder for file in files for folder in PurePosixPath(file.path.casefold()).parents}
        names: set[PurePosixPath] = set()
        for file in files:
            name = PurePosixPath(file.path.casefold())
            if name in names or name in folders:
                raise InvalidRequest(
                    f"{self._asked.repo_id} has a file {file.path[:_LONGEST_SHOWN]!r} and something else of that name, "
                    "give or take capital letters, which cannot be in one folder everywhere. Leave one out with "
                    "exclude.",
                    param="exclude",
                )
            names.add(name)

    def _not_a_hub(self) -> DownloadFailed:
        return DownloadFailed(
            f"{self._endpoint} does not list the files of {self._asked.repo_id} with sizes and hashes, as the Hugging "
            "Face Hub does. Check HF_ENDPOINT."
        )

    def _discard_others(self, files: Sequence[HubFile]) -> None:
        """What an earlier attempt has left of files that are not wanted any more."""
        wanted = {LOCK_NAME, *(file.digest for file in files), *(file.digest + _PARTIAL for file in files)}
        for path in self._staging.iterdir():
            if path.name not in wanted:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_space(self, files: Sequence[HubFile], wanted: Sequence[HubFile]) -> None:
        needed = sum(file.size for file in files) - sum(self._bytes_there(file) for file in wanted)
        free = shutil.disk_usage(self._staging).free
        if needed > free:
            raise DiskFull(
                f"{self._asked.repo_id} needs {_gigabytes(needed)} more, and {self._destination.parent.name} has "
                f"{_gigabytes(free)} left. Free some space, or leave files out with exclude."
            )

    # --- fetching -------------------------------------------------------------------------------------------------

    def _whole(self, file: HubFile) -> Path:
        return self._staging / file.digest

    def _partial(self, file: HubFile) -> Path:
        return self._staging / (file.digest + _PARTIAL)

    def _bytes_there(self, file: HubFile) -> int:
        for path in (self._whole(file), self._partial(file)):
            if path.exists() and (size := path.stat().st_size) <= file.size:
                return size
        return 0

    def _fetch_all(self, commit: str, files: Sequence[HubFile], report: Report) -> None:
        tally = Tally(files)
        for file in files:
            tally.add(file, self._bytes_there(file))
        pool = ThreadPoolExecutor(PARALLEL_FILES)
        try:
            running: set[Future[None]] = {pool.submit(self._fetch, commit, file, tally) for file in files}
            told: DownloadProgress | None = None
            while True:
                done, running = wait(running, timeout=REPORT_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress = tally.progress()
                if progress != told:
                    report(progress)
                    told = progress
                if not running:
                    return
        finally:
            # Not waiting for those that run: after a failure the process ends.
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, commit: str, file: HubFile, tally: Tally) -> None:
        whole, partial = self._whole(file), self._partial(file)
        if not whole.exists():
            there = self._bytes_there(file)
            with open(partial, "ab") as output:
                output.truncate(there)
                output.seek(there)

                def count(size: int) -> None:
                    tally.add(file, size)
                    if output.tell() > file.size:  # what says no length could go on until the disk is full
                        raise DownloadFailed(
                            f"{file.path} of {self._asked.repo_id} does not end where the hub says. Ask for the "
                            "download again."
                        )

                http_get(
                    hf_hub_url(self._asked.repo_id, file.path, revision=commit, endpoint=self._endpoint),
                    output,
                    resume_size=there,
                    headers=self._headers,
                    expected_size=file.size,
                    displayed_filename=file.path,
                    tqdm_class=cast(Any, lambda **_: _Counter(count)),
                )
            if not file.is_that_of(partial):
                partial.unlink()
                raise DownloadFailed(
                    f"{file.path} of {self._asked.repo_id} has another content than the hub says. What came of it has "
                    "been deleted; ask for the download again."
                )
            os.replace(partial, whole)
        tally.complete(file)

    # --- after ----------------------------------------------------------------------------------------------------

    def _assemble(self, files: Sequence[HubFile]) -> None:
        """Give the files their names, and the folder its own."""
        folder = self._staging / _ASSEMBLED
        placed: dict[str, Path] = {}
        try:
            for file in files:
                target = path_within(folder, file.path)
                assert target is not None
                target.parent.mkdir(parents=True, exist_ok=True)
                if file.digest in placed:
                    shutil.copyfile(placed[file.digest], target)
                else:
                    os.replace(self._whole(file), target)
                    placed[file.digest] = target
            os.rename(folder, self._destination)
        except OSError:
            for digest, target in placed.items():  # for the next attempt
                os.replace(target, self._staging / digest)
            raise


class Tally:
    """Counts what comes, in several threads."""

    def __init__(self, files: Sequence[HubFile]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(files, 0)
        self._total = sum(file.size for file in files)
        self._bytes = 0
        self._done = 0
        self._last = files[0]

    def add(self, file: HubFile, count: int) -> None:
        with self._lock:
            self._counts[file] += count
            self._bytes += count
            self._last = file

    def complete(self, file: HubFile) -> None:
        with self._lock:
            self._done += 1
            self._last = file

    def progress(self) -> DownloadProgress:
        with self._lock:
            return DownloadProgress(
                phase="verifying" if self._bytes == self._total else "downloading",
                file=self._last.path,
                file_bytes=self._counts[self._last],
                file_total=self._last.size,
                files_done=self._done,
                files_total=len(self._counts),
                bytes=self._bytes,
                total=self._total,
            )


class _Counter:
    """What `http_get()` uses of a progress bar."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self.update = count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@contextmanager
def _errors_told(asked: DownloadRequest, endpoint: str) -> Iterator[None]:
    """What the hub's client raises, in words that say what to do."""
    repo = f"{asked.repo_id} on {endpoint}"
    try:
        yield
    except HFValidationError as error:
        raise InvalidRequest(
            f"repo_id {asked.repo_id!r} names no repository; it has the form owner/name.", param="repo_id"
        ) from error
    except GatedRepoError as error:
        raise InvalidRequest(
            f"{repo} is gated: accept its terms on its page there, then send a token of that account as token, or "
            "start the server with it in HF_TOKEN.",
            param="token",
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"There is no model {repo}, or it is private: that takes a token of an account that may read it, as token "
            "or in HF_TOKEN.",
            param="repo_id",
        ) from error
    except RevisionNotFoundError as error:
        raise NotFound(f"{repo} has no revision {asked.revision!r}.", param="revision") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            raise InvalidRequest(
                f"{endpoint} does not take the token for {asked.repo_id} ({status}). Send another one as token, or "
                "start the server with it in HF_TOKEN.",
                param="token",
            ) from error
        raise DownloadFailed(f"{repo} answers with {status}. {_GO_ON}") from error
    except OfflineModeIsEnabled as error:
        raise DownloadFailed("Nothing is downloaded: HF_HUB_OFFLINE is set where the server was started.") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise DownloadFailed(f"{repo} cannot be reached ({type(error).__name__}: {error}). {_GO_ON}") from error
    except OSError as error:
        if error.errno is None:  # the client's own, for what ends before its end
            raise DownloadFailed(f"A file of {repo} has broken off. {_GO_ON}") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"The disk is full. Free some space. {_GO_ON}") from error
        raise ServerError(
            f"The files of {asked.repo_id} cannot be written: {error.strerror}. Look at the folder that they go to."
        ) from error


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    # Ctrl-C reaches all processes of a terminal; the one that started this says when it is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    status = 1

    def tell(message: FromDownload) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    try:
        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=HubJob)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        HubDownload(job).run(tell)
        tell(DownloadDone())
        status = 0
    except ServerError as error:
        tell(DownloadError(error.to_record()))
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # not waiting for files that are still coming


if __name__ == "__main__":
    main()
