"""Whatever a model makes of the tags, it does not matter how the text is cut, and calls are of declared tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.parsing.formats.base import ToolFormat
from common.parsing.formats.deepseek_dsml import DeepSeekDsml
from common.parsing.formats.glm import Glm
from common.parsing.formats.hy3 import Hunyuan
from common.parsing.formats.minimax import MiniMax
from common.parsing.formats.qwen_xml import QwenXml
from tests.common.parsing.answers import calls_of, check_contents, chunk_sizes, texts_of
from tests.common.parsing.formats.tagged import TOOLS, read_with
from tests.common.parsing.reading import strict

FRAGMENTS = {
    QwenXml(): [
        *("<tool_call>\n<function=edit>\n", "<function=ls>", "<parameter=path>\n", "<parameter=count>"),
        *("\n</parameter>\n", "</function>", "</tool_call>", "<tool_call>", "1"),
    ],
    Glm(): [
        *("<tool_call>edit\n", "<tool_call>ls", "<arg_key>path</arg_key>\n", "<arg_key>count</arg_key>", "<arg_value>"),
        *("</arg_value>\n", "</tool_call>", "1"),
    ],
    Hunyuan(): [
        *("<tool_calls:opensource>\n<tool_call:opensource>edit", "<tool_call:opensource>ls<tool_sep:opensource>"),
        *("<arg_key:opensource>path</arg_key:opensource>\n", "<arg_value:opensource>", "</arg_value:opensource>\n"),
        *("</tool_call:opensource>", "</tool_calls:opensource>", "1"),
    ],
    MiniMax(): [
        *('<minimax:tool_call>\n<invoke name="edit">\n', '<invoke name="ls">', '<parameter name="path">'),
        *(
            '<parameter name="count">',
            "</parameter>\n",
            "</invoke>",
            "</minimax:tool_call>",
            "<minimax:tool_call>",
            "1",
        ),
    ],
    DeepSeekDsml(): [
        *('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="edit">\n', '<｜DSML｜invoke name="ls">'),
        *('<｜DSML｜parameter name="path" string="true">', '<｜DSML｜parameter name="count" string="false">'),
        *("</｜DSML｜parameter>\n", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "1"),
    ],
}


@pytest.mark.parametrize("format", FRAGMENTS, ids=lambda format: str(format.names[0]))
def test_garbage(format: ToolFormat) -> None:
    @settings(max_examples=60)
    @given(texts_of(FRAGMENTS[format]), chunk_sizes, st.sampled_from(["complete", "cut"]))
    def check(text: str, sizes: Sequence[int], ending: Literal["complete", "cut"]) -> None:
        whole = read_with(format, text, [len(text) or 1], ending)
        assert read_with(format, text, sizes, ending) == whole
        assert read_with(format, text, [1], ending) == whole
        check_contents(text, whole)
        for call in calls_of(whole):
            assert call.name in TOOLS
            assert isinstance(strict(call.arguments), dict)

    check()
