"""The log: where it goes, what each line carries, and what it never shows."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from common.config_models import LoggingConfig
from common.logger import request_id, setup_logging

pytestmark = pytest.mark.usefixtures("logging_put_back")


def file_text(directory: Path) -> str:
    (path,) = directory.iterdir()
    return path.read_text(encoding="utf-8")


def test_console_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(), tmp_path / "logs")
    logger.info("hello {}", "there")
    logger.debug("not shown")
    captured = capsys.readouterr()
    assert "hello there" in captured.err
    assert captured.out == ""
    assert "hello there" in file_text(tmp_path / "logs")
    assert "not shown" not in captured.err + file_text(tmp_path / "logs")


def test_parts_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(log_console=False, log_file=False), tmp_path / "logs")
    logger.error("nobody reads this")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "logs").exists()


def test_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(log_level="WARNING", log_file=False))
    logger.info("quiet")
    logging.getLogger("uvicorn.error").info("quiet too")
    logger.warning("loud")
    error = capsys.readouterr().err
    assert "quiet" not in error
    assert "loud" in error


def test_setting_up_again_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(log_file=False))
    setup_logging(LoggingConfig(log_file=False))
    logger.info("once")
    logging.getLogger("other").warning("also once")
    error = capsys.readouterr().err
    assert error.count("once") == 2


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.error", "uvicorn.access", "some.library"])
def test_standard_library_is_included(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logging.getLogger(name).addHandler(logging.NullHandler())
    setup_logging(LoggingConfig(log_console=False), tmp_path)
    logging.getLogger(name).warning("from %s with {braces}", name)
    text = file_text(tmp_path)
    assert f"from {name} with {{braces}}" in text
    assert "WARNING" in text
    assert "test_logger:" in text  # the caller, not the handler


def test_level_that_loguru_does_not_have(tmp_path: Path) -> None:
    setup_logging(LoggingConfig(log_console=False), tmp_path)
    logging.getLogger("x").log(35, "in between")
    assert "in between" in file_text(tmp_path)


def test_request_id_is_in_each_line_of_its_request(tmp_path: Path) -> None:
    setup_logging(LoggingConfig(log_console=False), tmp_path)

    async def serve(identity: str) -> None:
        token = request_id.set(identity)
        logger.info("from {}", identity)
        await asyncio.sleep(0)
        await asyncio.create_task(answer(identity))
        request_id.reset(token)

    async def answer(identity: str) -> None:
        logging.getLogger("library").warning("for %s", identity)

    async def both() -> None:
        await asyncio.gather(serve("req-1"), serve("req-2"))

    asyncio.run(both())
    logger.info("outside")
    lines = file_text(tmp_path).splitlines()
    for identity in ("req-1", "req-2"):
        assert sum(f"{identity} from {identity}" in line for line in lines) == 1
        assert sum(f"{identity} for {identity}" in line for line in lines) == 1
    assert "req" not in lines[-1]


def test_id_that_looks_like_markup_or_a_format_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(), tmp_path)
    token = request_id.set("<red>{0}")
    logger.info("<blue>{unchanged}")
    request_id.reset(token)
    assert "<red>{0} <blue>{unchanged}" in capsys.readouterr().err
    assert "<red>{0} <blue>{unchanged}" in file_text(tmp_path)


def test_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(log_json=True), tmp_path)
    token = request_id.set("req-1")
    logger.warning("two\nlines")
    request_id.reset(token)
    for text in (capsys.readouterr().err, file_text(tmp_path)):
        (line,) = text.splitlines()
        record: dict[str, Any] = json.loads(line)["record"]
        assert (record["message"], record["level"]["name"]) == ("two\nlines", "WARNING")
        assert record["extra"] == {"request_id": "req-1"}


def test_tracebacks_show_no_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(), tmp_path)
    key = "s3cret"
    try:
        int(key[1:] + key[0])
    except ValueError:
        logger.opt(exception=True).error("failed")
    try:
        raise KeyError(len(key))
    except KeyError:
        logging.getLogger("library").exception("failed too")
    text = capsys.readouterr().err + file_text(tmp_path)
    assert text.count("ValueError") >= 2
    assert text.count("KeyError") >= 2
    assert "s3cret" not in text.replace('key = "s3cret"', "")


def test_folder_that_cannot_be_made_is_said_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    setup_logging(LoggingConfig(), tmp_path / "logs")
    assert "No log file" in capsys.readouterr().err


def test_file_is_rotated_and_kept_for_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[dict[str, Any]] = []
    monkeypatch.setattr(logger, "add", lambda sink, **options: added.append(options))
    setup_logging(LoggingConfig(log_console=False), tmp_path)
    (options,) = added
    assert (options["rotation"], options["retention"], options["compression"]) == ("20 MB", "1 week", "zip")


HOSTILE = "a\x1b[31m\x9b2J\r\x08\x7f\u202eb\u2028\n12:00:00 ERROR   forged\tc"


def test_what_requests_hold_is_no_command_to_a_terminal_and_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(LoggingConfig(), tmp_path)
    logger.info("said {}", HOSTILE)
    logging.getLogger("other").warning(HOSTILE)
    for shown in (capsys.readouterr().err, file_text(tmp_path)):
        # A colour code of loguru's own would stand before the message.
        assert shown.count(r"a\x1b[31m\x9b2J\r\x08\x7f\u202eb\u2028") == 2
        assert shown.count("\n    12:00:00 ERROR   forged\tc") == 2
        assert not any(control in shown for control in "\x1b\x9b\r\x08\x7f\u202e\u2028")


def test_json_lines_keep_the_lines_of_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LoggingConfig(log_json=True, log_file=False))
    logger.info("{}", "a\n\x1bb")
    assert json.loads(capsys.readouterr().err)["record"]["message"] == "a\n\\x1bb"
