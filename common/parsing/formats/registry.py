"""All formats. A new one is a file in this folder and a row here."""

from __future__ import annotations

from common.parsing.formats.apertus import Apertus
from common.parsing.formats.base import ToolFormat
from common.parsing.formats.deepseek_dsml import DeepSeekDsml
from common.parsing.formats.deepseek_v3 import DeepSeekV3, DeepSeekV31
from common.parsing.formats.functionary import Functionary
from common.parsing.formats.gemma4 import Gemma4
from common.parsing.formats.glm import Glm
from common.parsing.formats.hermes import Hermes
from common.parsing.formats.hy3 import Hunyuan
from common.parsing.formats.json_families import (
    CommandR,
    CommandR7b,
    Functools,
    GigaChat3,
    Granite3,
    InternLm2,
    LongCat,
    MiniMaxM1,
    Nemotron,
    Phi4Mini,
    ToolCalls,
)
from common.parsing.formats.kimi import Kimi
from common.parsing.formats.llama3_json import Llama3Json
from common.parsing.formats.minimax import MiniMax
from common.parsing.formats.mistral import Mistral
from common.parsing.formats.mistral_old import MistralOld
from common.parsing.formats.pythonic import Lfm2, Olmo3, Pythonic
from common.parsing.formats.qwen_xml import QwenXml
from common.parsing.formats.solar import Solar

FORMATS: tuple[ToolFormat, ...] = (
    QwenXml(),
    Glm(),
    MiniMax(),
    Hunyuan(),
    DeepSeekDsml(),
    Hermes(),
    Mistral(),
    MistralOld(),
    Kimi(),
    DeepSeekV3(),
    DeepSeekV31(),
    Gemma4(),
    Llama3Json(),
    Pythonic(),
    Lfm2(),
    Olmo3(),
    Nemotron(),
    ToolCalls(),
    MiniMaxM1(),
    Phi4Mini(),
    Granite3(),
    CommandR(),
    CommandR7b(),
    InternLm2(),
    LongCat(),
    GigaChat3(),
    Functools(),
    Functionary(),
    Solar(),
    Apertus(),
)


def format_named(name: str) -> ToolFormat | None:
    """The format that a value of `tool_format` means."""
    return next((format for format in FORMATS if name in format.names), None)


def default_format() -> ToolFormat:
    """What calls are written in where nothing is known of a model's own form: the one that most models have seen."""
    format = format_named("hermes")
    assert format is not None
    return format
