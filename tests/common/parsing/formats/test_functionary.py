from __future__ import annotations

import pytest

from common.parsing.formats.functionary import Functionary
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS

LS = ("ls", {"path": "/srv"})
ONE = '<function=ls>{"path": "/srv"}</function>'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (ONE, [LS], ""),
        (f"ok\n{ONE}{ONE}\nDone.", [LS, LS], "ok\nDone."),
        ('<function=ls>{"path": "/srv"', [LS], ""),
        ('<function=ls>\n{"path": "/srv"\n</function>', [LS], ""),
        ("<function=ls>", [], "<function=ls>"),
        ("<function=ls> calls it", [], "<function=ls> calls it"),
        ("<function=rm_all>{}</function>", [], "<function=rm_all>{}</function>"),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(Functionary(), text, tools=TOOLS) == (calls, content)
