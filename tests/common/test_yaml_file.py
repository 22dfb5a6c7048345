"""Files that were made to be read badly."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import SettingsError
from common.yaml_file import MAX_BYTES, read_mapping

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
OBJECT = "a: !!python/object/apply:os.system ['echo']\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "so often"),
        ("a: &a [*a]\n", "so often"),
        ("a: &a {b: *a}\n", "so often"),
        (OBJECT, "line 1"),
        ("a: 2026-99-99\n", "a date or a number"),
        ("a: !!int x\n", "a date or a number"),
        ("a: " + "[" * 1_000, "nested too deeply"),
        ("a: x\n" + "#" * MAX_BYTES, "larger than"),
    ],
)
def test_hostile_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=said):
        read_mapping(path)


def test_aliases_may_be_used(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("a: &a {b: [1, 2]}\nc: *a\nd: [*a, *a]\n", encoding="utf-8")
    assert read_mapping(path) == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": [{"b": [1, 2]}] * 2}
