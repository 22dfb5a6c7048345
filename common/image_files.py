"""Images that requests name as files of the server, in one folder of its."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from common.errors import InvalidRequest, Unsupported
from common.image_urls import MAX_IMAGE_BYTES
from common.names import path_within

SCHEME: Final = "file:"


def read_image_file(url: str, folder: Path | None, param: str) -> bytes:
    """The file that a file: URL names.

    What follows the scheme and its slashes is looked for in the folder, unless it begins with the folder's own path:
    file://cat.png, file:///cat.png and file:///srv/images/cat.png are the same in /srv/images. What is linked into the
    folder is in it.

    Args:
        folder: None where requests may name no files.
        param: path of the URL in the request, for errors.

    Raises:
        InvalidRequest: there is no such file in the folder, or it is too large; whatever there is elsewhere.
        Unsupported: there is no folder.
    """
    if folder is None:
        raise Unsupported(
            "Images are not read from files, as no network.image_dir is set; send the image itself, as a data: URL.",
            param=param,
        )
    folder = folder.absolute()
    path = path_within(folder, _name(url, folder))
    # Unlike Path.is_file() also false for a name that is too long; a pipe, which would be waited for, is no file.
    if path is None or not os.path.isfile(path):
        raise _refusal(param)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise _refusal(param) from error
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"The image is larger than {MAX_IMAGE_BYTES // 1024**2} MB.", param=param)
    return data


def _name(url: str, folder: Path) -> str:
    path = "/" + unquote(url.strip()[len(SCHEME) :]).lstrip("/")
    begin = "/" + folder.as_posix().strip("/") + "/"
    return path.removeprefix(begin).lstrip("/")


def _refusal(param: str) -> InvalidRequest:
    return InvalidRequest("There is no such image in the folder network.image_dir.", param=param)
