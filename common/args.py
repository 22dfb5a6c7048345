"""The command line, derived from the settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from common.settings_catalog import ALL_SETTINGS, CATALOG, SECTIONS, did_you_mean

Command: TypeAlias = Literal["serve", "export-config", "export-openapi"]


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for.

    Attributes:
        options: the values of single options, by section and key; not yet checked.
        config_file: the file given by `--config`.
        export_path: where a sub-command writes.
    """

    command: Command = "serve"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    config_file: str | None = None
    export_path: str = ""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        usage="main.py [OPTION ...] [COMMAND]",
        description="Serve language models over an OpenAI-compatible API. Every setting is an option here.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file whose values count before those of config.yml")
    for section, settings in CATALOG.items():
        group = parser.add_argument_group(section, SECTIONS[section].__doc__)
        for setting in settings.values():
            group.add_argument(
                setting.option,
                dest=setting.name,
                metavar={"list": "ITEM", "mapping": "JSON", None: "VALUE"}[setting.collection],
                nargs="+" if setting.collection == "list" else None,
                help=setting.description.replace("%", "%%"),
            )

    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="instead of serving")
    usage = "main.py {} [OPTION ...]"
    export_config = commands.add_parser(
        "export-config", help="write a sample of config.yml", usage=usage.format("export-config")
    )
    export_config.add_argument("--export-path", metavar="FILE", default="config_sample.yml", help="the file to write")
    export_openapi = commands.add_parser(
        "export-openapi", help="write the OpenAPI description of the routes", usage=usage.format("export-openapi")
    )
    export_openapi.add_argument("--export-path", metavar="FILE", default="openapi.json", help="the file to write")
    export_openapi.add_argument(
        "--api-servers", metavar="NAME", nargs="+", dest="exported_servers", help="front ends whose routes to describe"
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line, by default the process's; exits with a message where it cannot be read."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    # Asked first: argparse takes the value of an unknown option for a command, and complains about that.
    known = {setting.option for setting in ALL_SETTINGS} | {"--config", "--help", "--export-path"}
    for argument in argv:
        option = argument.split("=")[0]
        if option.startswith("--") and option not in known:
            parser.error(f"Unknown option {option}.{did_you_mean(option, known)}")
    parsed = vars(parser.parse_args(argv))

    options: dict[str, dict[str, Any]] = {}
    for setting in ALL_SETTINGS:
        value = parsed[setting.name]
        # A single item may be a whole list, [20,24] or 20,24.
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value:
            options.setdefault(setting.section, {})[setting.key] = value
    # argparse cannot give an option of a sub-command the place of the same one before it.
    if servers := parsed.get("exported_servers"):
        options.setdefault("network", {})["api_servers"] = servers
    return Arguments(
        command=parsed["command"] or "serve",
        options=options,
        config_file=parsed["config"],
        export_path=parsed.get("export_path", ""),
    )
