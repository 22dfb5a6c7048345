"""Files of a model that are missing, cut off, damaged or made up: each is named, before a weight is read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.model_files import INDEX, check_complete, check_files, read_object
from common.errors import InvalidRequest
from common.limits import MAX_CONFIG_BYTES

WEIGHTS = "model.safetensors"
TENSOR: dict[str, Any] = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


def weights(header: object, data: bytes = bytes(12)) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with which nothing is wrong."""
    directory = tmp_path / "m"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (directory / name).write_text("{}", encoding="utf-8")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}}), encoding="utf-8")
    (directory / WEIGHTS).write_bytes(weights({"__metadata__": {"format": "pt"}, "a": TENSOR}))
    return directory


def test_a_folder_as_it_should_be(folder: Path) -> None:
    check_files(folder)
    check_complete(folder)
    (folder / INDEX).unlink()
    check_complete(folder)


NOT_OBJECTS = {
    "empty": (b"", "line 1, column 1"),
    "binary": (bytes(range(256)), "is not UTF-8 text"),
    "other-encoding": ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text"),
    "cut": (b'{\n"a": [1,', "line 2, column 9"),
    "list": (b"[]", "holds no JSON object"),
    "null": (b"null", "holds no JSON object"),
    "deep": (b"[" * 100_000, "is not JSON that can be read"),
    "long-number": (b"1" * 5000, "is not JSON that can be read"),
}


@pytest.mark.parametrize(("content", "what"), NOT_OBJECTS.values(), ids=NOT_OBJECTS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_what_should_be_an_object(folder: Path, name: str, content: bytes, what: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"{name} of m .*{what}") as raised:
        check_files(folder)
    assert str(folder.parent) not in raised.value.message


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_folder_in_place_of_a_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(InvalidRequest, match=f"{name} of m cannot be read"):
        check_files(folder)


def test_a_link_that_leads_to_itself(folder: Path) -> None:
    config = folder / "config.json"
    config.unlink()
    try:
        config.symlink_to(config)
    except OSError:
        pytest.skip("links cannot be made here")
    with pytest.raises(InvalidRequest, match=r"config\.json of m cannot be read"):
        read_object(config)


WHOLE = weights({"a": TENSOR})
BROKEN_WEIGHTS = {
    "empty": b"",
    "no-length": WHOLE[:4],
    "no-header": WHOLE[:8],
    "half-a-header": WHOLE[:30],
    "no-data": WHOLE[:-12],
    "cut-by-a-byte": WHOLE[:-1],
    "long-header": struct.pack("<Q", 1 << 60) + WHOLE[8:],
    "short-header": struct.pack("<Q", 5) + WHOLE[8:],
    "binary-header": struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
    "list": weights([]),
    "text": weights({"a": "x"}),
    "without-a-place": weights({"a": {"dtype": "BF16", "shape": [2, 3]}}),
    "behind-the-end": weights({"a": TENSOR | {"data_offsets": [0, 1 << 50]}}),
    "before-the-beginning": weights({"a": TENSOR | {"data_offsets": [-8, 4]}}),
    "backwards": weights({"a": TENSOR | {"data_offsets": [8, 4]}}),
    "odd-offsets": weights({"a": TENSOR | {"data_offsets": "0, 12"}}),
    "odd-shape": weights({"a": TENSOR | {"shape": [-1, 3]}}),
    "odd-type": weights({"a": TENSOR | {"dtype": 5}}),
}


@pytest.mark.parametrize("content", BROKEN_WEIGHTS.values(), ids=BROKEN_WEIGHTS)
def test_weights_that_are_cut_off_or_damaged(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"model\.safetensors of m is (cut off or )?damaged.*Download"):
        check_files(folder)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ({"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}, "m is incomplete: model-2.safetensors missing"),
        ({"weight_map": []}, "holds no object weight_map"),
        ({"weight_map": {"a": 1}}, "names 1, which is no file"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "which is no file of the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is no file of the folder"),
        ({"weight_map": {"a": "x\0y"}}, "which is no file of the folder"),
        ({"weight_map": {"a": ".."}}, "which is no file of the folder|missing"),
    ],
)
def test_an_index_that_names_what_is_not_there(folder: Path, index: object, what: str) -> None:
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=what):
        check_complete(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).unlink()
    with pytest.raises(InvalidRequest, match=r"m is incomplete: \*\.safetensors missing"):
        check_complete(folder)


# --- what costs more than it should -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_configuration_that_is_too_large(folder: Path, name: str) -> None:
    text = json.dumps({"a": ""})
    (folder / name).write_text(text.ljust(MAX_CONFIG_BYTES), encoding="utf-8")
    check_files(folder)
    (folder / name).write_text(text.ljust(MAX_CONFIG_BYTES + 1), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=f"{name} of m is larger than 16 MB"):
        check_files(folder)


def test_an_index_may_be_larger(folder: Path) -> None:
    with (folder / INDEX).open("a", encoding="utf-8") as file:
        file.write(" " * MAX_CONFIG_BYTES)
    check_files(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "x.safetensors"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(InvalidRequest, match=f"{name} of m is neither a file nor a folder"):
        check_files(folder)


def test_links_and_folders_beside_the_files(folder: Path) -> None:
    (folder / "figures").mkdir()
    try:
        (folder / "a-link").symlink_to(folder / "config.json")
        (folder / "a-broken-one").symlink_to(folder / "nothing")
    except OSError:
        pytest.skip("links cannot be made here")
    check_files(folder)


@pytest.mark.parametrize("place", ["", "text_config", "llm_config"])
def test_more_layers_than_there_are_weights_for(folder: Path, place: str) -> None:
    """The engine would build them all, and fail when the memory is full."""

    def say(layers: object) -> None:
        said = {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps({place: said} if place else said), encoding="utf-8")

    names = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "x.999999999.y")
    (folder / WEIGHTS).write_bytes(weights(dict.fromkeys(names, TENSOR)))
    for layers in (0, 3, "many", None):  # what is no number is left to the engine
        say(layers)
        check_files(folder)
    say(4)
    with pytest.raises(InvalidRequest, match=rf"config\.json of m says {place}\.?num_hidden_layers 4, but .* for 3"):
        check_files(folder)
    say(10**30)
    with pytest.raises(InvalidRequest, match="num_hidden_layers"):
        check_files(folder)


def test_what_is_incomplete_is_not_said_to_have_too_few_layers(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}))
    check_files(folder)
    with pytest.raises(InvalidRequest, match="incomplete"):
        check_complete(folder)


def test_other_parts_of_a_model_may_have_more_layers(folder: Path) -> None:
    """The weights of what sees pictures are often left out."""
    (folder / "config.json").write_text('{"vision_config": {"num_hidden_layers": 27}}', encoding="utf-8")
    check_files(folder)
