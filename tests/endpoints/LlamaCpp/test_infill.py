from __future__ import annotations

from typing import Any

import pytest

from backends.messages import ControlToken
from common.errors import Unsupported
from endpoints.LlamaCpp.types.request import InfillRequest
from endpoints.LlamaCpp.utils.requests import infill_prompt
from tests.endpoints.running import RunningServer

PSM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
SPM = ["[SUFFIX]", "[PREFIX]"]
TEXTS = {"input_prefix": "def f(", "prompt": "x", "input_suffix": "[SUFFIX]\n"}
EXTRA = [{"filename": "a.py", "text": "one"}, {"text": "two"}]


def written(names: list[str], **body: Any) -> tuple[str, list[str]]:
    """The prompt, and its literal parts."""
    tokens = [ControlToken(name, index, special=True) for index, name in enumerate(names)]
    prompt = infill_prompt(InfillRequest.model_validate({**TEXTS, **body}), tokens)
    assert prompt.prompt == prompt.text
    return prompt.text, [prompt.text[start:end] for start, end in prompt.literals]


def test_the_prefix_first() -> None:
    text, literals = written(PSM)
    assert text == "<|fim_prefix|>def f(x<|fim_suffix|>[SUFFIX]\n<|fim_middle|>"
    assert literals == ["def f(x", "[SUFFIX]\n"]


def test_the_suffix_first() -> None:
    text, literals = written(SPM)
    assert text == "[SUFFIX][SUFFIX]\n[PREFIX]def f(x"
    assert literals == ["[SUFFIX]\n", "def f(x"]


def test_other_files() -> None:
    text, literals = written(PSM, input_extra=EXTRA)
    assert text.startswith("one\n\ntwo\n\n<|fim_prefix|>")
    assert literals[:2] == ["one\n\n", "two\n\n"]


def test_other_files_of_a_repository() -> None:
    text, literals = written([*PSM, "<|repo_name|>", "<|file_sep|>"], input_extra=EXTRA)
    marked = "<|repo_name|>repository\n<|file_sep|>a.py\none<|file_sep|>tmp\ntwo<|file_sep|>file\n<|fim_prefix|>"
    assert text.startswith(marked)
    assert literals[:4] == ["repository\n", "a.py\none", "tmp\ntwo", "file\n"]


def test_a_model_that_cannot() -> None:
    with pytest.raises(Unsupported, match="middle"):
        written(["<|im_end|>"])


def test_refused_over_http(server: RunningServer) -> None:
    response = server.http.post("/infill", json=TEXTS)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"prompt": [1]}, "prompt"),
        ({"input_extra": "x"}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra.0.text"),
        ({"input_extra": [{"text": 5}]}, "input_extra.0.text"),
        ({"input_extra": [{"text": "x", "filename": 5}]}, "input_extra.0.filename"),
    ],
)
def test_bodies_that_are_none(server: RunningServer, body: dict[str, object], param: str) -> None:
    response = server.http.post("/infill", json={**TEXTS, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
