"""The command line, derived from the settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from common.download_messages import DownloadRequest, RepoType
from common.settings_catalog import ALL_SETTINGS, CATALOG, SECTIONS, Setting, did_you_mean

Command: TypeAlias = Literal["serve", "plan", "download", "export-config", "export-openapi"]

CONFIG_HELP = "YAML file whose values count before those of config.yml"


@dataclass(frozen=True)
class PlanArguments:
    """What `plan` is asked for.

    Attributes:
        prompt_tokens: length of the prompt.
        model: name or path; None: the one that would be loaded at start.
        boundaries: token positions.
        plot: where to write a picture.
        as_json: instead of text.
    """

    prompt_tokens: int
    model: str | None = None
    boundaries: tuple[int, ...] = ()
    plot: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for.

    Attributes:
        options: the values of single options, by section and key; not yet checked.
        config_file: the file given by `--config`.
        export_path: where a sub-command writes.
        plan: of the sub-command of that name; None for others.
        download: as well.
    """

    command: Command = "serve"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    config_file: str | None = None
    export_path: str = ""
    plan: PlanArguments | None = None
    download: DownloadRequest | None = None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        usage="main.py [OPTION ...] [COMMAND]",
        description="Serve language models over an OpenAI-compatible API. Every setting is an option here.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    for section, settings in CATALOG.items():
        group = parser.add_argument_group(section, SECTIONS[section].__doc__)
        for setting in settings.values():
            _add_setting(group, setting, help=setting.description.replace("%", "%%"))

    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="instead of serving")
    usage = "main.py {} [OPTION ...]"
    plan = commands.add_parser(
        "plan",
        help="show where a model's recurrent checkpoints would lie, and what edits of a prompt would cost",
        description="Show where a model's recurrent checkpoints would lie in a prompt, what they take, and what an "
        "edit costs with them. No weight is read. Every setting is an option here too, as in main.py --help.",
        usage=usage.format("plan"),
    )
    plan.add_argument("--model", metavar="NAME", help="name or path (default: the one that is loaded at start)")
    plan.add_argument("--prompt-tokens", metavar="N", type=int, required=True, help="length of the prompt")
    plan.add_argument(
        "--boundaries",
        metavar="N,…",
        type=_positions,
        default=(),
        help="tokens at which the system prompt or a message ends, such as 512,3800",
    )
    plan.add_argument("--plot", metavar="FILE.png", help="draw what edits cost (needs matplotlib)")
    plan.add_argument("--json", action="store_true", dest="as_json", help="print JSON, for other programs")
    plan.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
    for setting in ALL_SETTINGS:
        _add_setting(plan, setting, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    download = commands.add_parser(
        "download",
        help="download a model from the Hugging Face Hub",
        description="Download a repository of the Hugging Face Hub to a new folder in model_dir. What has come is kept "
        "when it is interrupted; the same command goes on from there.",
        usage="main.py download REPO [OPTION ...]",
    )
    download.add_argument("repo_id", metavar="REPO", help="owner/name")
    download.add_argument("--folder-name", metavar="NAME", help="the new folder (default: the repository's name)")
    download.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: the main branch)")
    download.add_argument("--token", metavar="TOKEN", help="for private and gated repositories (default: HF_TOKEN)")
    for option, text in (
        ("--include", "only files whose path matches one of these, such as '*.json', in quotes"),
        ("--exclude", "and none of these"),
    ):
        download.add_argument(option, metavar="GLOB", nargs="+", action="extend", help=text)
    download.add_argument(
        "--type",
        dest="repo_type",
        choices=get_args(RepoType),
        default="model",
        help="whose folder it goes to: model_dir (default), lora_dir, draft_model_dir or embedding_model_dir",
    )
    download.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
    for section, key in (
        ("model", "model_dir"),
        ("lora", "lora_dir"),
        ("draft_model", "draft_model_dir"),
        ("embeddings", "embedding_model_dir"),
    ):
        setting = CATALOG[section][key]
        _add_setting(download, setting, default=argparse.SUPPRESS, help=setting.description.replace("%", "%%"))
    export_config = commands.add_parser(
        "export-config", help="write a sample of config.yml", usage=usage.format("export-config")
    )
    export_config.add_argument("--export-path", metavar="FILE", default="config_sample.yml", help="the file to write")
    export_openapi = commands.add_parser(
        "export-openapi", help="write the OpenAPI description of the routes", usage=usage.format("export-openapi")
    )
    export_openapi.add_argument("--export-path", metavar="FILE", default="openapi.json", help="the file to write")
    _add_setting(
        export_openapi,
        CATALOG["network"]["api_servers"],
        default=argparse.SUPPRESS,
        help="front ends whose routes to describe",
    )
    return parser


def _add_setting(
    parser: argparse._ActionsContainer, setting: Setting, *, help: str, default: str | None = None
) -> None:
    """`default=argparse.SUPPRESS` lets an option of a sub-command leave alone the same one before it."""
    parser.add_argument(
        setting.option,
        dest=setting.name,
        metavar={"list": "ITEM", "mapping": "JSON", None: "VALUE"}[setting.collection],
        nargs="+" if setting.collection == "list" else None,
        default=default,
        help=help,
    )


def _positions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(position) for position in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 512,3800") from None


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line, by default the process's; exits with a message where it cannot be read."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    # Asked first: argparse takes the value of an unknown option for a command, and complains about that.
    known = {setting.option for setting in ALL_SETTINGS} | {"--config", "--help", "--export-path"}
    if "plan" in argv:
        known |= {"--model", "--prompt-tokens", "--boundaries", "--plot", "--json"}
    if "download" in argv:
        known |= {"--folder-name", "--revision", "--token", "--include", "--exclude", "--type"}
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
    return Arguments(
        command=parsed["command"] or "serve",
        options=options,
        config_file=parsed["config"],
        export_path=parsed.get("export_path", ""),
        plan=PlanArguments(**{key.name: parsed[key.name] for key in fields(PlanArguments)})
        if parsed["command"] == "plan"
        else None,
        download=_download(parsed) if parsed["command"] == "download" else None,
    )


def _download(parsed: dict[str, Any]) -> DownloadRequest:
    given = {name: parsed[name] for name in DownloadRequest.__struct_fields__ if parsed.get(name) is not None}
    return msgspec.convert(given, DownloadRequest)
