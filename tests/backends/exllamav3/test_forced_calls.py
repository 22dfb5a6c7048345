"""Calls that a real model has to make."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from backends.exllamav3.model import ExllamaV3Container
from common.parsing.answer import AnswerParser
from common.parsing.dialect import CallRules, ReadOptions
from common.parsing.formats.base import Tool, Tools
from common.parsing.formats.registry import format_named
from common.parsing.grammar import answer_constraints
from common.parsing.pieces import CallArguments, CallBegin, CallEnd
from common.parsing.tags import TagDialect
from tests.containers import answered, loaded

pytestmark = pytest.mark.slow  # test_grammar.py has the same with a model that knows nothing


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(min_length=1, max_length=40)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=14)
    hours: list[int] = Field(max_length=4)


TOOLS = [
    Tool("get_weather", Weather.model_json_schema()),
    Tool("get_time", {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}),
]
PROMPT = """\
<|im_start|>user
What will the weather be in Paris, in celsius, for the next 3 days?<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
async def container(smollm2: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(smollm2, cache_size=2048, max_seq_len=2048) as container:
        yield container


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
async def test_smollm2_calls_a_tool_as_its_schema_asks(container: ExllamaV3Container, name: str) -> None:
    format = format_named(name)
    assert format is not None
    dialect = TagDialect(None, [format])
    special = {token.text: token.token_id for token in container.encoder.control_tokens if token.special}
    rules = CallRules(TOOLS[:1], required=True, many=False)
    constraints = answer_constraints(dialect, [], rules, in_thought=False, special_tokens=special)
    answer = await answered(container, PROMPT, constraints=constraints, max_tokens=120)
    assert answer.finish.eos_reason == "end_filter", answer.text

    parser = AnswerParser(dialect, ReadOptions(Tools(TOOLS)))
    begin, *arguments, end = [*parser.feed(answer.text), *parser.end("complete")]
    assert begin == CallBegin("get_weather")
    assert end == CallEnd(complete=True)
    Weather.model_validate_json("".join(piece.text for piece in arguments if isinstance(piece, CallArguments)))
