"""The log: loguru for everything, uvicorn and other users of the standard library included.

Each record carries the id of the request that it belongs to, where it belongs to one. Values of local variables are
never logged (loguru's `diagnose`): they may be keys and prompts.
"""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

from common.config_models import LoggingConfig

if TYPE_CHECKING:
    from loguru import Record

LOG_DIRECTORY = Path("logs")

# What moves a terminal's cursor, colours it or reverses its text. Prompts, names and fields of requests can hold it.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

# The id of the request that is being served. Tasks started while it is set inherit it.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup_logging(settings: LoggingConfig, directory: Path = LOG_DIRECTORY) -> None:
    """Send the log where the settings say; what was set up before is replaced.

    Args:
        settings: the section `logging`.
        directory: where the log file goes; created if need be. Where that fails, the console says so.
    """
    logger.remove()
    logger.configure(patcher=partial(_complete, indent=not settings.log_json), extra={"request_id": ""})
    if settings.log_console and sys.stderr is not None:  # which is closed where nobody wants to read it
        logger.add(
            sys.stderr,
            level=settings.log_level,
            format=_console_format,
            serialize=settings.log_json,
            backtrace=False,
            diagnose=False,
        )
    level = logger.level(settings.log_level).no
    logging.basicConfig(handlers=[ToLoguru()], level=level, force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(max(level, logging.DEBUG))  # below that it logs queries, which may hold keys
    for name in ("httpx", "httpcore"):  # they log whole URLs, which may hold keys
        logging.getLogger(name).setLevel(logging.WARNING)
    if settings.log_file:
        _add_file(settings, directory)


def _add_file(settings: LoggingConfig, directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the log may hold prompts
        logger.add(
            directory / f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}.log",
            level=settings.log_level,
            format=_file_format,
            serialize=settings.log_json,
            rotation="20 MB",
            retention="1 week",
            compression="zip",
            encoding="utf-8",
            backtrace=False,
            diagnose=False,
        )
    except OSError as error:
        logger.warning("No log file: {} cannot be written ({})", directory, error.strerror)


def _complete(record: Record, *, indent: bool) -> None:
    """Add the request's id, and see to it that nothing in a message passes for a command to a terminal or for a record.

    Args:
        indent: lines of a message after its first.
    """
    if identity := request_id.get():
        record["extra"]["request_id"] = identity
    message = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], record["message"])
    record["message"] = message.replace("\n", "\n    ") if indent else message


def _console_format(record: Record) -> str:
    request = "<cyan>{extra[request_id]}</cyan> " if record["extra"]["request_id"] else ""
    return "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> " + request + "{message}\n{exception}"


def _file_format(record: Record) -> str:
    request = "{extra[request_id]} " if record["extra"]["request_id"] else ""
    return "{time:YYYY-MM-DD HH:mm:ss.SSSZ} {level: <8} {name}:{line} " + request + "{message}\n{exception}"


class ToLoguru(logging.Handler):
    """Hands records of the standard library on to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        # The caller is the frame that called into `logging`, not this handler.
        depth, frame = 1, sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == logging.__file__:
            depth, frame = depth + 1, frame.f_back
        logger.opt(depth=depth, exception=record.exc_info).log(level, "{}", record.getMessage())
