"""Reading the YAML files that people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from common.errors import SettingsError


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
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{name} must hold keys with values, such as\nmodel:\n  model_name: my-model")
    return {str(key): value for key, value in content.items()}


def _problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem)
    if isinstance(error, DuplicateKeyError):
        return problem.split(" with value")[0] + ". Keep one of the two."
    if "'\\t'" in problem:
        return "a tab is used for indentation. Use spaces."
    return f"{problem}. Check the indentation, brackets and quotes here and in the lines before."
