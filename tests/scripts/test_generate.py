"""The generated files: that they are up to date, and that it would be noticed if they were not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.settings_catalog import ALL_SETTINGS
from scripts.generate import ROOT, TABLES, fill_tables, generated_files, main


def test_generated_files_are_up_to_date() -> None:
    stale = [path.name for path, text in generated_files(ROOT).items() if path.read_text(encoding="utf-8") != text]
    assert stale == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for path in generated_files(ROOT):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def test_check_names_stale_files_and_changes_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"], copy) == 0
    page = copy / "docs" / "02.-Server-options.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| `port` |", "| `prot` |"), encoding="utf-8")
    (copy / "config_sample.yml").unlink()
    assert main(["--check"], copy) == 1
    error = capsys.readouterr().err
    assert "config_sample.yml is stale" in error
    assert "02.-Server-options.md is stale" in error
    assert not (copy / "config_sample.yml").exists()
    assert main([], copy) == 0
    assert main(["--check"], copy) == 0
    assert "| `port` |" in page.read_text(encoding="utf-8")


def test_text_around_a_table_is_kept() -> None:
    page = "before\n<!-- generated: settings lora -->\nold\n<!-- end of settings lora -->\nafter\n"
    filled = fill_tables(page)
    assert filled.startswith("before\n<!-- generated: settings lora -->\n| Key |")
    assert filled.endswith("|\n<!-- end of settings lora -->\nafter\n")
    assert fill_tables(filled) == filled


def test_options_page_documents_every_setting() -> None:
    page = (ROOT / "docs" / "02.-Server-options.md").read_text(encoding="utf-8")
    for name in TABLES:
        if name.startswith("settings "):
            assert page.count(f"<!-- generated: {name} -->") == 1
    assert all(f"| `{setting.key}` |" in page for setting in ALL_SETTINGS)
