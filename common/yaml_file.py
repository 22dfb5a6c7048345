"""Reading the YAML files that people write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from common.errors import SettingsError

# A model's folder, which somebody else may have made, has such a file too.
MAX_BYTES: Final = 256 * 1024
MAX_VALUES: Final = 100_000


def read_mapping(path: Path, name: str | None = None) -> dict[str, Any]:
    """The mapping that a file holds; an empty file is an empty mapping.

    Args:
        path: the file.
        name: what messages call it, by default its path as given.

    Raises:
        FileNotFoundError: there is no such file.
        SettingsError: it cannot be read or is not a mapping. Names file and line, and quotes no values, which may be
            keys.
    """
    name = name or str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{name} is larger than {MAX_BYTES // 1024} KB, which no file of settings is.")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SettingsError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name} is not UTF-8 text (byte {error.start}). Save it in that encoding.") from None
    try:
        content = YAML(typ="safe", pure=True).load(text)
    # Not `from error`: the parser's messages quote the file.
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{name}{line}: {_problem(error)}") from None
    except YAMLError:
        raise SettingsError(f"{name} is not YAML: it holds characters that YAML does not allow.") from None
    except RecursionError:
        raise SettingsError(f"{name} is nested too deeply.") from None
    except ValueError:  # of a value that looks like a date or a number
        raise SettingsError(f"{name} holds a date or a number that is none. Put quotes around texts.") from None
    if _size(content, {}) > MAX_VALUES:
        raise SettingsError(f"{name} refers back to its own values so often that it holds more than {MAX_VALUES}.")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{name} must hold keys with values, such as\nmodel:\n  model_name: my-model")
    return {str(key): value for key, value in content.items()}


def _size(value: object, known: dict[int, float]) -> float:
    """Values in a value when each alias is written out; infinite where one stands for what it is part of.

    Args:
        known: sizes of the collections seen so far, by identity.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # while it is being counted
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(item, known) for item in items)
    return known[id(value)]


def _problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem)
    if isinstance(error, DuplicateKeyError):
        return problem.split(" with value")[0] + ". Keep one of the two."
    if "'\\t'" in problem:
        return "a tab is used for indentation. Use spaces."
    return f"{problem}. Check the indentation, brackets and quotes here and in the lines before."
