from __future__ import annotations

import pytest

from common.parsing.formats.base import Call
from common.parsing.formats.pythonic import Lfm2, Olmo3, Pythonic
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

PYTHONIC = Pythonic()
LS = ("ls", {"path": "/srv"})
NOW: tuple[str, object] = ("get-now.utc", {})


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('[ls(path="/srv")]', [LS], ""),
        ("[ls(path='/srv'), get-now.utc()]", [LS, NOW], ""),
        ("[ ls( path = '/srv' , ) , ]", [LS], ""),
        ("<|python_start|>[ls(path='/srv')]<|python_end|>", [LS], ""),
        ("Let me see. <|python_start|>[ls(path='/srv')]<|python_end|>Done.", [LS], "Let me see. Done."),
        ("<|python_start|>ls(path='/srv')<|python_end|>", [LS], ""),
        ("[ls(path='/srv')] Done.", [LS], "Done."),
        ("[ls(path='/srv'", [LS], ""),
        ("[ls(path='/srv')", [LS], ""),
        ("[ls(path=5, depth='2')]", [("ls", {"path": "5", "depth": 2})], ""),
        (
            "[free(a='it\\'s', b=[True, None, -1.5, (1,)], c={'d': \"e\\n\"}, f=False)]",
            [("free", {"a": "it's", "b": [True, None, -1.5, [1]], "c": {"d": "e\n"}, "f": False})],
            "",
        ),
        ("[free(a='it's')]", [("free", {"a": "it's"})], ""),
        ("[free(a='''x\n'y' ''')]", [("free", {"a": "x\n'y' "})], ""),
    ],
)
def test_calls(text: str, calls: list[object], content: str) -> None:
    assert answer(PYTHONIC, text, tools=TOOLS) == (calls, content)


@pytest.mark.parametrize(
    "text",
    [
        "[1] See the appendix, and [2].",
        "[ls](http://a.b)",
        "[rm_all()]",
        "As in [ls(path='/srv')].",
        "[ls('/srv')]",
        "[ls(path=open('x'))]",
        "[ls(**x)]",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(PYTHONIC, text, "cut", TOOLS) == ([], text)


def test_a_call_before_one_that_is_none_stays() -> None:
    assert answer(PYTHONIC, "[ls(path='/srv'), rm_all()]", tools=TOOLS) == ([LS], ", rm_all()]")


def test_a_call_that_is_cut_is_none() -> None:
    assert answer(PYTHONIC, "[ls(path='/srv'", "cut", TOOLS) == ([], "[ls(path='/srv'")


def test_it_is_written_in_python() -> None:
    arguments = '{"path": "a\\"\\u00e9\\n", "x-y": [1.50, null, true], "no name": {"b": false}}'
    written = PYTHONIC.write([Call("free", arguments), Call("get-now.utc", "{}")])
    assert written == '[free(path="a\\"é\\n", x-y=[1.50, None, True], "no name"={"b": False}), get-now.utc()]'
    assert read_block(PYTHONIC, written, TOOLS).calls[0] == (
        "free",
        None,
        '{"path": "a\\"é\\n", "x-y": [1.50, null, true], "no name": {"b": false}}',
    )


def test_other_marks() -> None:
    lfm2 = "<|tool_call_start|>[ls(path='/srv'), get-now.utc()]<|tool_call_end|>ok"
    assert answer(Lfm2(), lfm2, tools=TOOLS) == ([LS, NOW], "ok")
    olmo3 = "ok\n<function_calls>\nls(path='/srv')\nget-now.utc()\n</function_calls>"
    assert answer(Olmo3(), olmo3, tools=TOOLS) == ([LS, NOW], "ok")
