#!/usr/bin/env python3
"""Makes the files that derive from the code: config_sample.yml, and the tables in docs/.

    scripts/generate.py            write them
    scripts/generate.py --check    write nothing; name those that are stale, and exit with 1 if there are any

A table stands in its page between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; the text around it is written
by hand.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import AliasChoices, BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backends.manager import ModelManager  # noqa: E402
from common.config_models import Settings  # noqa: E402
from common.errors import ServerError  # noqa: E402
from common.fim import FAMILIES  # noqa: E402
from common.metrics import Metrics  # noqa: E402
from common.parsing.formats.base import Call  # noqa: E402
from common.parsing.formats.registry import FORMATS  # noqa: E402
from common.sampling import ForeignSamplers, SamplingFields, SamplingParameters  # noqa: E402
from common.settings_catalog import CATALOG, Setting  # noqa: E402
from common.tabby_config import SAMPLE_FILE, render_config  # noqa: E402
from endpoints.OAI.types.common import Usage  # noqa: E402
from endpoints.server import create_app, route_table  # noqa: E402

MARKED = re.compile(r"(<!-- generated: (?P<name>.+?) -->\n)(?P<table>.*?)(<!-- end of (?P=name) -->)", re.DOTALL)


def settings_table(section: str) -> str:
    rows = ["| Key | Default | Values | |", "|---|---|---|---|"]
    rows += [_row(setting) for setting in CATALOG[section].values()]
    return "\n".join(rows)


def _row(setting: Setting) -> str:
    default = "" if setting.default is None else f"`{json.dumps(setting.default)}`"
    text = setting.description
    if setting.no_effect is not None:
        # One with `when` does nothing for some of its values only.
        text += f" *{'No effect: ' if setting.no_effect.when is None else 'Note: '}{setting.no_effect.reason}*"
    return " | ".join(["| `" + setting.key + "`", default, setting.allowed, text.replace("|", "\\|") + " |"])


def routes_table() -> str:
    app = create_app(Settings(), ModelManager(Path("models")), None)
    methods: dict[tuple[str, str], list[str]] = {}
    for method, path, level, alias in route_table(app):
        if not alias:
            methods.setdefault((path.replace(":path}", "}"), level), []).append(method)
    rows = ["| Route | Methods | Key |", "|---|---|---|"]
    rows += [f"| `{path}` | {', '.join(names)} | {level} |" for (path, level), names in methods.items()]
    return "\n".join(rows)


def errors_table() -> str:
    rows = ["| Status | `type` | `code` | `Retry-After` | |", "|---|---|---|---|---|"]
    for leaf in sorted(_error_tree(ServerError), key=lambda error: error.status):
        retry = "" if leaf.retry_after is None else f"{leaf.retry_after} s"
        meaning = re.split(r"\.(?:\s|$)", leaf.__doc__ or "")[0]
        rows.append(f"| {leaf.status} | `{leaf.type}` | `{leaf.code}` | {retry} | {meaning}. |")
    return "\n".join(rows)


def _error_tree(error: type[ServerError]) -> list[type[ServerError]]:
    return [error, *(leaf for child in error.__subclasses__() for leaf in _error_tree(child))]


def sampling_table() -> str:
    return _fields_table(SamplingParameters.__struct_fields__, "Default")


def length_table() -> str:
    elsewhere = {*SamplingParameters.__struct_fields__, *ForeignSamplers.model_fields, "logprobs", "top_logprobs"}
    return _fields_table([name for name in SamplingFields.model_fields if name not in elsewhere], "Default")


def foreign_samplers_table() -> str:
    return _fields_table(ForeignSamplers.model_fields, "Off at")


def _fields_table(names: Iterable[str], default: str) -> str:
    rows = [f"| Parameter | Other names | {default} |", "|---|---|---|"]
    for name in names:
        field = SamplingFields.model_fields[name]
        alias = field.validation_alias
        others = [f"`{other}`" for other in alias.choices if other != name] if isinstance(alias, AliasChoices) else []
        value = "" if field.default is None else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {', '.join(others)} | {value} |")
    return "\n".join(rows)


def usage_table() -> str:
    return "\n".join(["| Field | |", "|---|---|", *_usage_rows(Usage)])


def _usage_rows(record: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in record.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _usage_rows(field.annotation, f"{path}{name}.")
        else:
            yield f"| `{path}{name}` | {field.description} |"


def fill_in_the_middle_table() -> str:
    rows = ["| Before the prompt | Before the suffix | Before the answer |", "|---|---|---|"]
    rows += ["| " + " | ".join(f"`{token}`" if token else "" for token in tokens[:3]) + " |" for tokens in FAMILIES]
    return "\n".join(rows).replace("<|", "<\\|").replace("|>", "\\|>")


def tool_formats_table() -> str:
    rows = ["| `tool_format` | A call |", "|---|---|"]
    for format in FORMATS:
        names = ", ".join(f"`{name}`" for name in format.names)
        call = format.write([Call("ls", '{"path": "/srv"}')]).replace("\n", "↵").replace("|", "\\|")
        marks = "``" if "`" not in call else "````"
        rows.append(f"| {names} | {marks} {call} {marks} |")
    return "\n".join(rows)


def metrics_table() -> str:
    rows = ["| Metric | Type | Labels | |", "|---|---|---|---|"]
    for name, type, labels, description in Metrics().families:
        rows.append(f"| `{name}` | {type} | {', '.join(f'`{label}`' for label in labels)} | {description} |")
    return "\n".join(rows)


# What stands between markers, by name.
TABLES: Mapping[str, Callable[[], str]] = {
    **{f"settings {section}": functools.partial(settings_table, section) for section in CATALOG},
    "routes": routes_table,
    "errors": errors_table,
    "sampling": sampling_table,
    "length": length_table,
    "foreign samplers": foreign_samplers_table,
    "usage": usage_table,
    "fill in the middle": fill_in_the_middle_table,
    "tool formats": tool_formats_table,
    "metrics": metrics_table,
}


def fill_tables(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}\n{match[4]}", page)


def generated_files(root: Path) -> dict[Path, str]:
    """What every generated file should hold."""
    pages = sorted((root / "docs").glob("*.md"))
    return {
        root / SAMPLE_FILE: render_config(Settings()),
        **{page: fill_tables(page.read_text(encoding="utf-8")) for page in pages},
    }


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is stale")
    check = parser.parse_args(argv).check
    stale = [
        (path, text)
        for path, text in generated_files(root).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if check:
            print(f"{path.relative_to(root)} is stale: run scripts/generate.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
