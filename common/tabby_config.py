"""Settings from files, the environment and the command line; what a load is made of; the sample file.

Later wins: defaults, `config.yml`, environment, the file named by `--config`, single command-line options. For one load
see `merge_load_settings`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from loguru import logger
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from common.config_models import DraftModelParameters, LoadSettings, LoraParameters, ModelParameters, Settings
from common.errors import InvalidRequest, SettingsError
from common.names import path_within
from common.settings_catalog import ALL_SETTINGS, CATALOG, SECTIONS, did_you_mean, explain_refusal, unknown_keys
from common.yaml_file import read_mapping

CONFIG_FILE = "config.yml"
SAMPLE_FILE = "config_sample.yml"
MODEL_FILE = "tabby_config.yml"

# Relative to the working directory, which the engine's process does not share.
PATHS = (
    ("draft_model", "draft_model_dir"),
    ("draft_model", "ngram_corpus"),
    ("lora", "lora_dir"),
    ("memory", "disk_cache_dir"),
)

# Values by section and key, of any layer.
Values: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class LoadedSettings:
    """The settings in force.

    Attributes:
        sources: where each value came from, by "section.key".
        warnings: sentences for the log, which does not exist yet when settings are read.
        command_line: the values given as single options; they outrank a model's `tabby_config.yml` at start.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: list[str]
    command_line: Values


@dataclass(frozen=True)
class _Layer:
    """Values from one place, not yet checked."""

    values: Values
    source: Callable[[str, str], str]  # (section, key) -> what messages call the place


# --- reading ------------------------------------------------------------------------------------------------------


def load_settings(
    options: Values | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    directory: Path = Path(),
) -> LoadedSettings:
    """Read all settings.

    A file in an old layout is rewritten, see `migrate`.

    Args:
        options: single command-line options, by section and key.
        config_file: the file given by `--config`, relative to `directory`.
        environ: the environment.
        directory: where `config.yml` is looked for; it need not exist.

    Raises:
        SettingsError: a file is broken (named with the line) or missing, or values are refused (all are named, each
            with its source and what is allowed).
    """
    warnings: list[str] = []
    layers = []
    if (directory / CONFIG_FILE).exists():
        layers.append(_file_layer(directory / CONFIG_FILE, CONFIG_FILE, warnings))
    layers.append(_environment_layer(environ, warnings))
    if config_file is not None:
        if not (directory / config_file).exists():
            raise SettingsError(f"The file {config_file} given by --config does not exist.")
        layers.append(_file_layer(directory / config_file, str(config_file), warnings))
    command_line = _Layer(options or {}, lambda section, key: CATALOG[section][key].option)
    layers.append(command_line)

    merged: dict[str, Any] = {}
    sources = {setting.name: "default" for setting in ALL_SETTINGS}
    problems: list[str] = []
    checked: Values = {}
    for layer in layers:
        checked = _check(layer, problems)
        merged = _merge(merged, checked)
        for section, values in checked.items():
            sources |= {f"{section}.{key}": layer.source(section, key) for key in values}
            if "reasoning" in values and values["reasoning"] is None:
                warnings.append(_reasoning_is_unset(layer.source(section, "reasoning")))
    if problems:
        raise SettingsError("These settings cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))

    settings = Settings.model_validate(merged)
    warnings += _without_effect(settings, lambda section, key: sources[f"{section}.{key}"])
    warnings += _unknown_defaults(settings)
    return LoadedSettings(settings, sources, warnings, command_line=checked)


def _file_layer(path: Path, name: str, warnings: list[str]) -> _Layer:
    content = read_mapping(path, name)
    migrated = migrate(content)
    values = _sections(migrated, name, warnings)
    layer = _Layer(values, lambda section, key: name)
    if migrated != content:
        problems: list[str] = []
        checked = _check(layer, problems)
        # A file with mistakes is left as it is: its user will look for the line.
        if not problems:
            warnings.append(_rewrite(path, name, Settings.model_validate(checked)))
    return layer


def _sections(content: Mapping[str, Any], name: str, warnings: list[str]) -> dict[str, dict[str, Any]]:
    """The known sections of a file, with the known keys that are not null."""
    sections: dict[str, dict[str, Any]] = {}
    for section, values in content.items():
        if section not in CATALOG:
            warnings.append(f"Unknown section {section} in {name} is ignored.{did_you_mean(section, CATALOG)}")
        elif values is not None and not isinstance(values, dict):
            raise SettingsError(f"{name}: the section {section} must hold keys with values, indented below it.")
        elif values:
            values = {str(key): value for key, value in values.items()}
            warnings += unknown_keys(section, values, CATALOG[section], name)
            sections[section] = {k: v for k, v in values.items() if k in CATALOG[section] and v is not None}
    return sections


def _environment_layer(environ: Mapping[str, str], warnings: list[str]) -> _Layer:
    """Values from TABBY_SECTION_KEY; an empty variable is unset."""
    variables = {setting.variable: setting for setting in ALL_SETTINGS}
    sources = {}
    values: dict[str, dict[str, Any]] = {}
    # The short name first, so that the full one wins.
    if environ.get("TABBY_LOG_LEVEL"):
        values["logging"] = {"log_level": environ["TABBY_LOG_LEVEL"]}
        sources["logging", "log_level"] = "environment TABBY_LOG_LEVEL"
    prefixes = tuple(f"TABBY_{section}_".upper() for section in CATALOG)
    for name, text in environ.items():
        if name in variables and text.strip():
            setting = variables[name]
            values.setdefault(setting.section, {})[setting.key] = text
            sources[setting.section, setting.key] = f"environment {name}"
        elif name not in variables and name.startswith(prefixes):
            warnings.append(f"Unknown variable {name} in the environment is ignored.{did_you_mean(name, variables)}")
    return _Layer(values, lambda section, key: sources[section, key])


def _check(layer: _Layer, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The values of a layer with their right types; what is refused is added to `problems`."""
    checked = {}
    for section, values in layer.values.items():
        try:
            checked[section] = SECTIONS[section].model_validate(values).model_dump(exclude_unset=True)
        except ValidationError as error:
            for key, problem in explain_refusal(error, section, values).items():
                problems.append(f"{layer.source(section, key)}: {problem}")
    return checked


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated by `over`, mappings key by key."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _without_effect(settings: BaseModel, source: Callable[[str, str], str]) -> Iterator[str]:
    for section in type(settings).model_fields:
        for setting in CATALOG[section].values():
            if setting.no_effect and setting.is_ignored(getattr(getattr(settings, section), setting.key)):
                where = source(section, setting.key)
                yield f"{setting.name} ({where}) has no effect: {setting.no_effect.reason}"


def _reasoning_is_unset(source: str) -> str:
    return (
        f"model.reasoning: false ({source}) counts as unset, as TabbyAPI's sample writes it out. "
        "To turn the detection of thoughts off, set model.reasoning_mode: off."
    )


def _unknown_defaults(settings: Settings) -> Iterator[str]:
    known = [*ModelParameters.model_fields, *DraftModelParameters.model_fields]
    for name in settings.model.use_as_default:
        if name not in known:
            yield f"model.use_as_default names {name}, which is no setting of a model.{did_you_mean(name, known)}"


# --- old layouts --------------------------------------------------------------------------------------------------


def migrate(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file in the present layout; what has both layouts keeps the present one's values."""
    sections = {name: dict(values) if isinstance(values, dict) else values for name, values in content.items()}
    model = sections.get("model") or {}
    for old, new in (("draft", "draft_model"), ("lora", "lora")):
        if isinstance(model, dict) and old in model and isinstance(sections.get(new) or {}, dict):
            sections[new] = (model.pop(old) or {}) | (sections.get(new) or {})
    logging = sections.get("logging") or {}
    if isinstance(logging, dict):
        for key in [key for key in logging if f"log_{key}" in CATALOG["logging"]]:
            logging.setdefault(f"log_{key}", logging.pop(key))
    return sections


def _rewrite(path: Path, name: str, settings: Settings) -> str:
    """Exchange a file for one in the present layout, keeping the old one beside it; says what was done."""
    path = path.resolve()
    suffixes = itertools.chain([".bak"], (f".bak.{number}" for number in itertools.count(1)))
    backup = next(candidate for suffix in suffixes if not (candidate := path.with_name(path.name + suffix)).exists())
    try:
        shutil.copy2(path, backup)
        _write_atomically(path, render_config(settings))
    except OSError as error:
        backup.unlink(missing_ok=True)
        return (
            f"{name} has an old layout and could not be rewritten ({error.strerror}); its values are used all the same."
        )
    return f"{name} had an old layout and was rewritten; the old file is {backup.name}."


def _write_atomically(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, with the mode that it had."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# --- one load -----------------------------------------------------------------------------------------------------


def merge_load_settings(
    settings: Settings,
    *,
    model_directory: Path,
    request: Mapping[str, Any] | None = None,
    command_line: Values | None = None,
) -> LoadSettings:
    """What a model is loaded with.

    Later wins. At start: the sections `model` and `draft_model` and the adapters of `lora`, the `tabby_config.yml` in
    the model's folder, single command-line options. By request: the values of the settings that `use_as_default` names,
    the model's `tabby_config.yml`, the fields of the request that are not null. The memory settings and the folders of
    draft models and adapters are always the server's.

    Args:
        settings: the server's.
        model_directory: the model's folder.
        request: the body of a load request (`ModelLoadRequest.parameters()`), or None for the load at start.
        command_line: `LoadedSettings.command_line`, for the load at start.

    Raises:
        InvalidRequest: the request or the model's `tabby_config.yml` cannot be used; names file, line and keys.
    """
    server = {
        "model": settings.model.model_dump(include=set(ModelParameters.model_fields)),
        "draft_model": settings.draft_model.model_dump(include=set(DraftModelParameters.model_fields)),
    }
    if request is None:
        # An adapter is made for one model: others do not inherit it.
        server["lora"] = settings.lora.model_dump(include=set(LoraParameters.model_fields))
        first, last, source = server, command_line or {}, "command line"
    else:
        names = set(settings.model.use_as_default)
        first = {section: {k: v for k, v in values.items() if k in names} for section, values in server.items()}
        last = {"model": request, "draft_model": request.get("draft_model") or {}, "lora": request}
        source = "load request"

    merged = _merge(first, _model_file(model_directory))
    given = _check_load(_load_parameters(last), source)
    if request is not None and (corpus := given["draft_model"].get("ngram_corpus")):
        given["draft_model"]["ngram_corpus"] = _requested_corpus(Path(settings.model.model_dir), corpus)
    merged = _merge(merged, given)
    merged["draft_model"]["draft_model_dir"] = settings.draft_model.draft_model_dir
    merged["lora"]["lora_dir"] = settings.lora.lora_dir
    merged["memory"] = settings.memory.model_dump()
    for section, key in PATHS:
        if path := merged[section].get(key):
            merged[section][key] = str(Path(path).absolute())
    return LoadSettings.model_validate(merged)


def _requested_corpus(model_dir: Path, name: str) -> str:
    """Only those who write the server's files may name a file anywhere."""
    path = path_within(model_dir.absolute(), name)
    if path is None:
        param = "draft_model.ngram_corpus"
        raise InvalidRequest(
            f"{param} {name!r} must name a file inside the model directory. config.yml may name one elsewhere.",
            param=param,
        )
    return str(path)


def _check_load(values: Values, source: str) -> dict[str, dict[str, Any]]:
    """The values with their right types; what they ask for in vain is logged."""
    problems: list[str] = []
    checked = _check(_Layer(values, lambda section, key: source), problems)
    if problems:
        raise InvalidRequest("\n".join(problems))
    for warning in _without_effect(LoadSettings.model_validate(checked), lambda section, key: source):
        logger.warning("{}", warning)
    return checked


def _load_parameters(values: Values) -> dict[str, dict[str, Any]]:
    """Of some values, those that are about one load and not null."""
    parameters = {
        "model": ModelParameters.model_fields,
        "draft_model": DraftModelParameters.model_fields,
        "lora": LoraParameters.model_fields,
    }
    return {
        section: {k: v for k, v in values.get(section, {}).items() if k in fields and v is not None}
        for section, fields in parameters.items()
    }


def _model_file(directory: Path) -> dict[str, dict[str, Any]]:
    """The checked values of a model's own file; none where it has no file."""
    name = f"{directory.name}/{MODEL_FILE}"
    warnings: list[str] = []
    try:
        content = read_mapping(directory / MODEL_FILE, name)
        model = content.get("model")
        # TabbyAPI also takes the draft settings inside the model's.
        if isinstance(model, dict) and "draft_model" in model:
            content = {"draft_model": model.pop("draft_model"), **content}
        sections = _sections(content, name, warnings)
    except FileNotFoundError:
        return {}
    except SettingsError as error:
        raise InvalidRequest(str(error)) from error
    values = _load_parameters(sections)
    for section, given in sections.items():
        for key in given.keys() - values.get(section, {}).keys():
            warnings.append(f"{section}.{key} in {name} has no effect: it is a setting of the server, not of a model.")
    for warning in warnings:
        logger.warning("{}", warning)
    checked = _check_load(values, name)
    if checked["model"].get("reasoning", True) is None:
        logger.info("{}", _reasoning_is_unset(name))
    return checked


# --- the sample ---------------------------------------------------------------------------------------------------

_PREAMBLE = """\
# Settings of Waypoint, which reads them from config.yml in the folder it is started in.
#
# Every key may be left out or left empty; its default then holds. Indent with spaces, not tabs.
# What each key does, and how files, environment and command line combine: docs/02.-Server-options.md
"""


def generate_config_file(model: Settings | None = None, filename: str | Path = SAMPLE_FILE) -> None:
    """Write a commented file with all settings.

    Args:
        model: the values to write; None for the defaults.
        filename: the file; it is overwritten.
    """
    Path(filename).write_text(render_config(model or Settings()), encoding="utf-8")


def render_config(settings: Settings) -> str:
    """A YAML file with all settings, each under its description; reads back as equal settings."""
    lines = [_PREAMBLE]
    for index, (section, keys) in enumerate(CATALOG.items()):
        lines += [""] if index else []
        lines += [*_comment(SECTIONS[section].__doc__ or "", indent=0), f"{section}:"]
        for number, setting in enumerate(keys.values()):
            lines += [""] if number else []
            lines += [
                *_comment(setting.description, indent=2),
                f"  {setting.key}:{_yaml_value(getattr(getattr(settings, section), setting.key))}",
            ]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int) -> list[str]:
    prefix = " " * indent + "# "
    return textwrap.wrap(" ".join(text.split()), width=100, initial_indent=prefix, subsequent_indent=prefix)


def _yaml_value(value: Any) -> str:
    """What follows the colon."""
    if value is None:
        return ""
    if isinstance(value, str):
        return " " + (value if _is_plain(value) else json.dumps(value, ensure_ascii=False))
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return "".join(
            f"\n    {'-' if index == 0 else ' '} {key}:{_yaml_value(field)}"
            for item in value
            for index, (key, field) in enumerate(item.model_dump().items())
        )
    return " " + json.dumps(value, ensure_ascii=False)


def _is_plain(text: str) -> bool:
    """Whether a text needs no quotes to stay that text."""
    try:
        return bool(YAML(typ="safe", pure=True).load(f"key: {text}") == {"key": text})
    except YAMLError:
        return False
