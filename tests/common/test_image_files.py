"""Images in a folder of the server: which file a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import image_files
from common.errors import InvalidRequest, Unsupported
from common.image_files import read_image_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a picture, and one in a folder in it; beside it something secret."""
    folder = tmp_path / "my pictures"
    (folder / "cats").mkdir(parents=True)
    (folder / "cat.png").write_bytes(b"cat")
    (folder / "cats" / "a b%.png").write_bytes(b"another")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return folder


@pytest.mark.parametrize("before", ["file:", "file:/", "file://", "file:///", "FILE://", " file://"])
def test_a_name_is_looked_for_in_the_folder(folder: Path, before: str) -> None:
    assert read_image_file(f"{before}cat.png", folder, "url") == b"cat"
    assert read_image_file(f"{before}cats/a%20b%25.png", folder, "url") == b"another"


def test_the_path_of_the_folder_may_stand_before_it(folder: Path) -> None:
    assert read_image_file((folder / "cat.png").as_uri(), folder, "url") == b"cat"
    assert read_image_file(f"file:/{folder.as_posix()}/cats/a b%25.png", folder, "url") == b"another"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "dog.png",
        "cats",
        "cats/",
        "cat.png/",
        "../secret.png",
        "cats/../../secret.png",
        "%2e%2e/secret.png",
        "..%2fsecret.png",
        "..\\secret.png",
        "/etc/hosts",
        "C:/cat.png",
        "cat.png%00",
        "NUL",
        "a" * 5000,
    ],
)
def test_nothing_else_is_named(folder: Path, name: str) -> None:
    for before in ("file:", "file://", "file:///", (folder.as_uri() + "/")):
        with pytest.raises(InvalidRequest, match="no such image") as caught:
            read_image_file(before + name, folder, "url")
        assert caught.value.param == "url"
        assert str(folder) not in caught.value.message


def test_a_file_that_is_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", 2)
    with pytest.raises(InvalidRequest, match="larger than"):
        read_image_file("file:cat.png", folder, "url")


def test_without_a_folder_nothing_is_read() -> None:
    with pytest.raises(Unsupported, match="image_dir"):
        read_image_file("file:///etc/hosts", None, "url")
