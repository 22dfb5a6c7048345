from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import InvalidRequest, ModelNotFound
from common.model_folder import model_folder
from common.names import is_plain_name, path_within, tagged, untagged

# Texts that could lead somewhere else, on one system or another.
HOSTILE_NAMES = [
    *("", " ", ".", "..", "...", ".. ", ". .", "../x", "x/..", "x/../../y", "/etc", "//host/share", "/"),
    *(
        "..\\x",
        "x\\y",
        "\\\\host\\share",
        "C:\\x",
        "C:/x",
        "c:x",
        "x\0",
        "\0",
        "x\ny",
        "x\ry",
        "x\ty",
        "\x7f",
        "x\u2028",
    ),
    *("NUL", "nul.jinja", "con", "CON .txt", "aux.", "com1", "LPT9.x", "COM¹", "conin$", "cut \ud83d", "\udcff"),
    *("~/../x", "x/", "x//y", "./x"),
]
PLAIN_NAMES = [
    "x",
    "Qwen3.5-27B-exl3_4.0bpw",
    "name with spaces",
    "llama3:8b",
    "..x",
    "x..",
    "x.",
    ".hidden",
    "console",
]
PLAIN_NAMES += ["com10", "nulled", "%2e%2e", "%2e%2e%2f", "~", "$HOME", "模型", "é" * 127, "-rf", "a\u0301"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names(name: str) -> None:
    assert not is_plain_name(name)
    assert path_within(Path("folder"), name) is None
    with pytest.raises(InvalidRequest, match="must name a folder inside the model directory") as caught:
        model_folder(Path("folder"), name, "model")
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_plain_names(name: str, tmp_path: Path) -> None:
    assert is_plain_name(name)
    assert path_within(tmp_path, name) == tmp_path / name
    with pytest.raises(ModelNotFound):
        model_folder(tmp_path, name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    assert model_folder(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "x" * 100_000, "/".join(["x"] * 5000)])
def test_a_name_that_is_too_long_names_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        model_folder(tmp_path, name)


def test_models_may_lie_in_a_folder_of_their_author(tmp_path: Path) -> None:
    (tmp_path / "author" / "model").mkdir(parents=True)
    (tmp_path / "author" / "model" / "config.json").write_text("{}")
    assert model_folder(tmp_path, "author/model") == tmp_path / "author" / "model"


def test_a_folder_that_is_linked_into_the_directory_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (tmp_path / "models").mkdir()
    try:
        (tmp_path / "models" / "linked").symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("this system makes no links for everybody")
    assert model_folder(tmp_path / "models", "linked") == tmp_path / "models" / "linked"


def test_tags() -> None:
    names = ("alpha", "author/alpha", "alpha:8b")
    assert [tagged(name) for name in names] == ["alpha:latest", "author/alpha:latest", "alpha:8b"]
    assert [untagged(tagged(name)) for name in names] == list(names)
