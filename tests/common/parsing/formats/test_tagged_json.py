"""What holds of all formats in which arguments are JSON, or nearly so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.formats import registry
from common.parsing.formats.base import Call, ToolFormat
from common.parsing.formats.deepseek_dsml import DeepSeekDsml
from common.parsing.formats.gemma4 import Gemma4
from common.parsing.formats.glm import Glm
from common.parsing.formats.hy3 import Hunyuan
from common.parsing.formats.minimax import MiniMax
from common.parsing.formats.mistral_old import MistralOld
from common.parsing.formats.pythonic import Pythonic
from common.parsing.formats.qwen_xml import QwenXml
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.formats.tagged import read_with
from tests.common.parsing.reading import TOOLS, Ending, mutated, read_block, strict, texts, values

BETWEEN_TAGS = (QwenXml, Glm, MiniMax, Hunyuan, DeepSeekDsml)
OWN_SYNTAX = (Gemma4, Pythonic)
FORMATS = [format for format in registry.FORMATS if not isinstance(format, BETWEEN_TAGS)]

ls_arguments = st.fixed_dictionaries({}, optional={"path": texts, "depth": st.integers()})
free_arguments = st.dictionaries(texts, values, max_size=3)


arguments_of_tools: st.SearchStrategy[tuple[str, dict[str, Any]]] = (
    st.tuples(st.just("ls"), ls_arguments)
    | st.tuples(st.just("free"), free_arguments)
    | st.tuples(st.just("get-now.utc"), st.just({}))
)


@st.composite
def some_calls(draw: st.DrawFn) -> list[Call]:
    as_ascii, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    return [
        Call(name, json.dumps(arguments, ensure_ascii=as_ascii, indent=indent))
        for name, arguments in draw(st.lists(arguments_of_tools, min_size=1, max_size=3))
    ]


@given(format=st.sampled_from(FORMATS), calls=some_calls(), sizes=chunk_sizes)
def test_calls_are_given_back_however_they_are_cut(format: ToolFormat, calls: list[Call], sizes: Sequence[int]) -> None:
    if format.between is not None:
        calls = calls[:1]
    read = read_block(format, format.write(calls), TOOLS, sizes)
    assert (read.broken, read.failed) == ([], False)
    assert [name for name, _, _ in read.calls] == [call.name for call in calls]
    for (_, _, arguments), call in zip(read.calls, calls, strict=True):
        assert strict(arguments) == strict(call.arguments)
        assert arguments == call.arguments or isinstance(format, OWN_SYNTAX)


@given(
    format=st.sampled_from(FORMATS),
    data=st.data(),
    sizes=chunk_sizes,
    ending=st.sampled_from(["complete", "cut"]),
)
def test_broken_calls_are_broken_however_they_are_cut(
    format: ToolFormat, data: st.DataObject, sizes: Sequence[int], ending: Ending
) -> None:
    calls = data.draw(some_calls())
    text = data.draw(mutated(format.write(calls)))
    whole = read_block(format, text, TOOLS, [len(text) or 1], ending)
    assert read_block(format, text, TOOLS, sizes, ending) == whole
    for name, _, arguments in whole.calls:
        assert name in TOOLS
        assert isinstance(strict(arguments), dict)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: str(format.names[0]))
def test_a_call_of_an_answer(format: ToolFormat) -> None:
    calls = [Call("ls", '{"path": "/srv", "depth": 2}'), Call("get-now.utc", "{}")]
    text = format.write(calls)
    before, after = ("", "\nDone.") if format.bare_starts else ("Well.\n", "\n\nDone.")
    whole = read_with(format, f"{before}{text}{after}", [1000], tools=TOOLS)
    assert read_with(format, f"{before}{text}{after}", [1], tools=TOOLS) == whole
    shown = [piece for piece in whole if "Call" not in type(piece).__name__]
    assert "".join(piece.text.strip() for piece in shown) == f"{before}{after}".replace("\n", "")  # type: ignore[union-attr]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: str(format.names[0]))
def test_the_arguments_arrive_while_they_are_generated(format: ToolFormat) -> None:
    text = format.write([Call("ls", '{"path": "/srv/some/where"}')])
    seen = read_block(format, text[: text.index("where") + 2], TOOLS, ending="cut")
    assert seen.failed
    assert seen.broken == ([] if isinstance(format, MistralOld) else ["ls"])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: str(format.names[0]))
def test_only_declared_tools_are_called(format: ToolFormat) -> None:
    read = read_block(format, format.write([Call("rm_all", '{"path": "/srv"}')]), TOOLS)
    assert (read.calls, read.broken, read.failed) == ([], [], True)
