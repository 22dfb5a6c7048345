from __future__ import annotations

import pytest

from common.parsing.formats.apertus import Apertus
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS

LS = ("ls", {"path": "/srv"})


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (
            'ok <|tools_prefix|>[{"ls": {"path": "/srv"}}, {"get-now.utc": {}}]<|tools_suffix|>',
            [LS, ("get-now.utc", {})],
            "ok",
        ),
        ('<|tools_prefix|>[{"ls": {"path": "/srv"', [LS], ""),
        ('<|tools_prefix|>[{"ls": {"path": "/srv"}<|tools_suffix|>', [LS], ""),
        ('<|tools_prefix|>[{"rm_all": {}}]', [], '<|tools_prefix|>[{"rm_all": {}}]'),
        ('<|tools_prefix|>[{"ls": 1}]', [], '<|tools_prefix|>[{"ls": 1}]'),
        ("<|tools_prefix|> is a mark", [], "<|tools_prefix|> is a mark"),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(Apertus(), text, tools=TOOLS) == (calls, content)
