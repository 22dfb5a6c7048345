from __future__ import annotations

import pytest

from common.parsing.formats.base import Call
from common.parsing.formats.gemma4 import Gemma4
from tests.common.parsing.formats.tagged import answer
from tests.common.parsing.reading import TOOLS, read_block

GEMMA = Gemma4()
Q = '<|"|>'


def call(arguments: str, name: str = "free") -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("{}", {}),
        (f"{{path:{Q}/srv{Q}}}", {"path": "/srv"}),
        (f"{{o:{{a:{Q}x }} y{Q},b:[1,2]}},n:3}}", {"o": {"a": "x } y", "b": [1, 2]}, "n": 3}),
        (f"{{a:true,b:null,c:-1.5,d:[{Q}x{Q},{{}}]}}", {"a": True, "b": None, "c": -1.5, "d": ["x", {}]}),
        (f"{{a:{Q}}}<tool_call|>{Q}}}", {"a": "}<tool_call|>"}),
        (f'{{a:{Q}"b" \\n{Q}}}', {"a": '"b" \\n'}),
        ('{"a":"b\\n"}', {"a": "b\n"}),
        (f"{{{Q}a b{Q}:1}}", {"a b": 1}),
        # drift
        (f"{{path={Q}a{Q}}}", {"path": "a"}),
        ("{ids:['a1','b2']}", {"ids": ["a1", "b2"]}),
        (f"{{Content-Type:{Q}json{Q}}}", {"Content-Type": "json"}),
        (f"{{ a : {Q}b{Q} , }}", {"a": "b"}),
        (f"{{a:[{Q}b{Q}", {"a": ["b"]}),
    ],
)
def test_arguments(arguments: str, right: object) -> None:
    assert answer(GEMMA, call(arguments), tools=TOOLS) == ([("free", right)], "")


def test_arguments_are_typed_by_the_schema() -> None:
    assert answer(GEMMA, call(f"{{path:Oslo,depth:{Q}2{Q}}}", "ls"), tools=TOOLS)[0] == [
        ("ls", {"path": "Oslo", "depth": 2})
    ]


def test_calls_in_a_row() -> None:
    text = f"ok{call('{}')}{call(f'{{path:{Q}a{Q}}}', 'ls')} then"
    assert answer(GEMMA, text, tools=TOOLS) == ([("free", {}), ("ls", {"path": "a"})], "ok then")


def test_the_end_of_a_call_is_its_brace() -> None:
    assert answer(GEMMA, call("{a:1}").removesuffix("<tool_call|>") + "\nDone.", tools=TOOLS)[0] == [("free", {"a": 1})]


@pytest.mark.parametrize(
    "text",
    [
        "Use <|tool_call> to call.",
        call("{]"),
        call("{a}"),
        call(f"{{a:{Q}b}}"),
        call("{}", "rm_all"),
        "<|tool_call>call:free now",
        "<|tool_call>free{}",
        call("{a:New York}"),
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert answer(GEMMA, text, tools=TOOLS) == ([], text)


def test_it_is_written_as_templates_do() -> None:
    arguments = f'{{"a b": [1.50, null, "x\\n"], "c": {{"d": true}}, "e": "{Q[:2]}\\"|>"}}'
    written = GEMMA.write([Call("free", arguments)])
    assert written == f'<|tool_call>call:free{{{Q}a b{Q}:[1.50,null,{Q}x\n{Q}],c:{{d:true}},e:"<|\\"|>"}}<tool_call|>'
    assert read_block(GEMMA, written, TOOLS).calls == [
        ("free", None, '{"a b":[1.50,null,"x\\n"],"c":{"d":true},"e":"<|\\"|>"}')
    ]
