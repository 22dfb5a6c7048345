"""Answers as models write them, and what becomes of them: the files in tests/model_answers.

A file is one setup of a model. What is not said of a sample is empty, and it ends because the model has ended it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

FOLDER = Path(__file__).with_name("model_answers")
TEMPLATES = Path(__file__).parent / "common" / "chat_templates"


class ExpectedCall(NamedTuple):
    name: str
    arguments: str  # JSON
    id: str | None = None  # where the model gives one


class Sample(BaseModel):
    """
    Attributes:
        text: what the model writes.
        chunks: a cut of it that has to be tried as well.
        cut: a limit of tokens ends it.
        tools: names of those in the request, of TOOLS; all by default.
        request: more fields of the request.
        broken: names of the calls that a stream begins with and that turn out to be none; "any" where that is open.
        verbatim: arguments come as the text has them, blanks and all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    text: str
    chunks: list[str] = []
    cut: bool = False
    tools: list[str] | None = None
    request: dict[str, Any] = {}
    content: str = ""
    reasoning: str = ""
    calls: list[ExpectedCall] = []
    broken: list[str] | Literal["any"] = []
    verbatim: bool = False

    @property
    def finish_reason(self) -> str:
        if self.cut:
            return "length"
        return "tool_calls" if self.calls else "stop"


class SampleFile(BaseModel):
    """
    Attributes:
        settings: of the model, as in a load request.
        template: a chat template; ChatML by default.
        template_file: the same, the name of a file in tests/common/chat_templates.
        control_tokens: texts that are one token each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = {}
    template: str | None = None
    template_file: str | None = None
    control_tokens: list[str] = []
    samples: list[Sample]

    def chat_template(self) -> str | None:
        if self.template_file is not None:
            return (TEMPLATES / self.template_file).read_text(encoding="utf-8")
        return self.template


def sample_files(kind: str) -> dict[str, SampleFile]:
    """Those in a folder of tests/model_answers, by name."""
    return {
        path.stem: SampleFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        for path in sorted((FOLDER / kind).glob("*.toml"))
    }


def each(files: Mapping[str, SampleFile]) -> list[tuple[str, Sample]]:
    """Every sample behind the name of its file."""
    return [(name, sample) for name, file in files.items() for sample in file.samples]


def as_id(value: str | Sample) -> str:
    return value if isinstance(value, str) else value.name


# --- tools ------------------------------------------------------------------------------------------------------------


def _tool(name: str, properties: dict[str, Any] | None) -> dict[str, Any]:
    parameters = None if properties is None else {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_STRING = {"type": "string"}
TOOLS = {
    name: _tool(name, properties)
    for name, properties in {
        "ls": {"path": _STRING},
        "write": {"path": _STRING, "content": _STRING},
        "edit": {"old_string": _STRING, "new_string": _STRING},
        "strings": dict.fromkeys("abcde", _STRING),
        "typed": {
            "text": _STRING,
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "on": {"type": "boolean"},
            "items": {"type": "array"},
            "options": {"type": "object"},
        },
        "now": {},
        "free": None,  # says nothing of its parameters
    }.items()
}


def same_json(first: str, second: str) -> bool:
    """Whether two texts are the same JSON; anything else, NaN included, is an error."""
    return _canonical(first) == _canonical(second)


def _canonical(text: str) -> str:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    return json.dumps(json.loads(text, parse_constant=refuse))
