"""What is found out about how a model writes thoughts and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.config_models import ModelConfig
from common.conversations import Message, Tool, calls_as_text
from common.errors import InvalidRequest
from common.parsing.detection import AnswerSyntax, detect, tool_format_names
from common.parsing.formats.base import ToolFormat
from common.parsing.formats.registry import FORMATS, default_format
from common.parsing.tags import TagDialect
from common.templating import TEMPLATE_DIR, ChatTemplate, Rendering

FAMILIES = Path(__file__).parents[1] / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
THINK = "<think> ... </think>"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>")
GLIMMER = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
NO_CALLS = "{% for m in messages if not m.tool_calls %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def template(source: str) -> ChatTemplate:
    return ChatTemplate("t", source, TOKENS)


def family(name: str) -> ChatTemplate:
    return template((FAMILIES / f"{name}.jinja").read_text(encoding="utf-8"))


def detected(source: str | None = None, tokens: tuple[str, ...] = (), **settings: Any) -> AnswerSyntax:
    return detect(None if source is None else template(source), tokens, ModelConfig(**settings))


def formats_of(syntax: AnswerSyntax) -> list[str]:
    assert isinstance(syntax.dialect, TagDialect)
    return [format.names[0] for format in syntax.dialect.formats]


# --- families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tool_format", "thoughts"),
    [
        ("qwen3", "hermes", THINK),
        ("qwen3_coder", "qwen3_coder", None),
        ("qwen3_5", "qwen3_coder", THINK),
        ("glm", "glm4_5", THINK),
        ("minimax", "minimax_m2", THINK),
        ("hunyuan", "hy3", "<think:opensource> ... </think:opensource>"),
        ("deepseek_v4", "deepseek_v4", THINK),
        ("deepseek", "deepseek_v3", THINK),
        ("deepseek_v3_1", "deepseek_v3_1", THINK),
        ("gemma4", "gemma4", "<|channel>thought ... <channel|>"),
        ("mistral", "mistral_old", None),
        ("mistral_v11", "mistral", "[THINK] ... [/THINK]"),
        ("kimi", "kimi", THINK),
        ("llama3", "llama3_json", None),
        ("pythonic", "pythonic", None),
        ("gpt_oss", "harmony", "<|channel|>analysis<|message|> ... <|end|>"),
        ("glimmer", "muse_glimmer", "to=self<|message|> ... <|eom|>"),
    ],
)
def test_what_a_template_writes_is_certain(name: str, tool_format: str, thoughts: str | None) -> None:
    syntax = detect(family(name), (), ModelConfig())
    assert syntax.tool_format[:2] == (tool_format, "certain")
    assert syntax.thoughts[:2] == (thoughts, "certain" if thoughts else "unknown")


@pytest.mark.parametrize("name", ["phi", "gemma", "typed_parts", "chatml", "alpaca"])
def test_templates_without_tools_and_thoughts(name: str) -> None:
    folder = FAMILIES if (FAMILIES / f"{name}.jinja").exists() else TEMPLATE_DIR
    syntax = detect(template((folder / f"{name}.jinja").read_text(encoding="utf-8")), (), ModelConfig())
    assert syntax.tool_format[:2] == (None, "unknown")
    assert syntax.thoughts[:2] == (None, "unknown")
    assert syntax.tags is None


class Writes(ChatTemplate):
    """ChatML whose calls are written by a format."""

    def __init__(self, format: ToolFormat, around: str = "{}") -> None:
        super().__init__("t", (TEMPLATE_DIR / "chatml.jinja").read_text(encoding="utf-8"), TOKENS)
        self.format = format
        self.around = around

    def render_as_given(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, tools: Sequence[Tool] | None = None
    ) -> Rendering:
        written = [
            {**shown, "content": self.around.format(shown["content"])} if message.get("tool_calls") else message
            for shown, message in zip(calls_as_text(messages, self.format), messages, strict=True)
        ]
        return super().render_as_given(written, variables, tools=tools)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_every_format_is_told_from_all_others(format: ToolFormat) -> None:
    syntax = detect(Writes(format), (), ModelConfig())
    assert syntax.tool_format == (format.names[0], "certain", "the chat template writes it")
    assert syntax.form is format
    assert formats_of(syntax)[0] == format.names[0]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.names[0])
def test_a_call_between_strange_marks_is_less_sure(format: ToolFormat) -> None:
    syntax = detect(Writes(format, "<strange>{}</strange>"), (), ModelConfig())
    found = (format.names[0], "likely") if format.trigger else (None, "unknown")
    assert syntax.tool_format[:2] == found


# --- marks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "tool_format"),
    [
        ('<tool_call>{\\"name\\": 1, \\"arguments\\": {}}</tool_call>', "hermes"),
        ("<tool_call>\\n<function=f>\\n<parameter=p>\\nv\\n</parameter>\\n</function>\\n</tool_call>", "qwen3_coder"),
        ("<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>", "glm4_5"),
        ("[TOOL_CALLS]f[ARGS]{}", "mistral"),
        ("[TOOL_CALLS][]", "mistral_old"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>f", "kimi"),
    ],
)
def test_marks_in_a_template(described: str, tool_format: str) -> None:
    syntax = detected('{{ "' + described + '" }}' + NO_CALLS)
    assert syntax.tool_format == (tool_format, "likely", "the chat template holds its marks")
    assert formats_of(syntax)[0] == tool_format


@pytest.mark.parametrize(
    ("tokens", "tool_format"),
    [
        (("<tool_call>", "</tool_call>"), "hermes"),
        (("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), "glm4_5"),
        (("<minimax:tool_call>", "</minimax:tool_call>"), "minimax_m2"),
        (("[TOOL_CALLS]", "[TOOL_RESULTS]"), "mistral_old"),
        (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
        (HARMONY, "harmony"),
        (GLIMMER, "muse_glimmer"),
    ],
)
def test_marks_in_a_vocabulary(tokens: tuple[str, ...], tool_format: str) -> None:
    syntax = detected(NO_CALLS, tokens)
    assert syntax.tool_format == (tool_format, "likely", "the tokenizer has its marks as tokens")
    assert detected(None, tokens).tool_format == syntax.tool_format


def test_a_template_says_more_than_a_vocabulary() -> None:
    syntax = detect(family("qwen3"), (*HARMONY, "[TOOL_CALLS]", "[THINK]", "[/THINK]"), ModelConfig())
    assert (syntax.tool_format.value, syntax.thoughts.value) == ("hermes", THINK)


def test_what_is_not_known_is_looked_for_in_every_form() -> None:
    syntax = detected(NO_CALLS)
    assert syntax.form is default_format()
    assert formats_of(syntax)[0] == "hermes"
    assert sorted(formats_of(syntax)) == sorted(format.names[0] for format in FORMATS if format.trigger)


def test_formats_that_begin_alike_are_tried_in_turn() -> None:
    for name, own, others in (
        ("glm", "glm4_5", {"qwen3_coder", "hermes"}),
        ("mistral", "mistral_old", {"mistral"}),
        ("hunyuan", "hy3", set()),
    ):
        [first, *rest] = formats_of(detect(family(name), (), ModelConfig()))
        assert (first, set(rest)) == (own, others)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ tools[0].function.parameters.properties.nothing.more }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "",
    ],
)
def test_a_template_that_fails_shows_nothing(source: str) -> None:
    syntax = detected(source)
    assert (syntax.tool_format.certainty, syntax.thoughts.certainty) == ("unknown", "unknown")


# --- thoughts -------------------------------------------------------------------------------------------------------

WRITES = "{% for m in messages %}<{{ m.role }}>BEFORE{{ m.reasoning_content }}AFTER{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("before", "after", "thoughts"),
    [
        ("<think>\n", "\n</think>\n\n", THINK),
        ("<deep_thought> ", "</deep_thought>", "<deep_thought> ... </deep_thought>"),
        ("[MUSING]", "[/MUSING]", "[MUSING] ... [/MUSING]"),
        ("◁think▷", "◁/think▷", "◁think▷ ... ◁/think▷"),
        ("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>", "<|START_THINKING|> ... <|END_THINKING|>"),
        ("<one>", "</other>", None),
        ("Thought: ", "\nAnswer: ", None),
    ],
)
def test_what_stands_around_a_thought(before: str, after: str, thoughts: str | None) -> None:
    syntax = detected(WRITES.replace("BEFORE", before).replace("AFTER", after))
    assert syntax.thoughts.value == thoughts
    assert syntax.tags == (tuple(thoughts.split(" ... ")) if thoughts else None)
    assert syntax.dialect.end_of_thought == (f"\n{syntax.tags[1]}\n\n" if syntax.tags else None)


@pytest.mark.parametrize(
    ("source", "tokens", "certainty"),
    [
        (NO_CALLS + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}", (), "certain"),
        (NO_CALLS + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}", (), "certain"),
        (NO_CALLS + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}", (), "certain"),
        ("{{ 'Write <think> and </think>' }}" + NO_CALLS, (), "likely"),
        (NO_CALLS.replace("m.content", "m.content.split('</think>')[-1]"), (), "likely"),
        (NO_CALLS, ("<think>", "</think>"), "likely"),
        (NO_CALLS, ("<think>",), "unknown"),
    ],
)
def test_how_sure_tags_are(source: str, tokens: tuple[str, ...], certainty: str) -> None:
    syntax = detected(source, tokens)
    assert syntax.thoughts[:2] == (None if certainty == "unknown" else THINK, certainty)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tags", "certainty"),
    [
        ({}, ("[THINK]", "[/THINK]"), "certain"),
        ({"reasoning": False}, ("[THINK]", "[/THINK]"), "certain"),
        ({"reasoning": True}, ("[THINK]", "[/THINK]"), "certain"),
        ({"reasoning_start_token": "<think>", "reasoning_end_token": "</think>"}, ("[THINK]", "[/THINK]"), "certain"),
        ({"reasoning_start_token": "<a>", "reasoning_end_token": "<b>"}, ("<a>", "<b>"), "set"),
        ({"reasoning_mode": "off"}, None, "set"),
        ({"reasoning_mode": "off", "reasoning": True, "reasoning_start_token": "<a>"}, None, "set"),
    ],
)
def test_settings_win_over_a_template(settings: dict[str, Any], tags: tuple[str, str] | None, certainty: str) -> None:
    syntax = detect(family("mistral_v11"), (), ModelConfig(**settings))
    assert (syntax.tags, syntax.thoughts.certainty) == (tags, certainty)


@pytest.mark.parametrize("settings", [{"reasoning": True}, {"reasoning_mode": "on"}])
def test_thoughts_in_any_case(settings: dict[str, Any]) -> None:
    syntax = detected(NO_CALLS, **settings)
    assert syntax.thoughts[:2] == (THINK, "set")
    assert syntax.tags == ("<think>", "</think>")


@pytest.mark.parametrize("name", tool_format_names())
def test_a_format_by_name(name: str) -> None:
    syntax = detected(tool_format=name)
    assert syntax.tool_format[:2] == ("muse_glimmer" if name == "glimmer" else name, "set")


@pytest.mark.parametrize(("name", "other"), [("mistral", "glm"), ("glm4_5", "gpt_oss")])
def test_a_format_by_name_wins_over_a_template(name: str, other: str) -> None:
    syntax = detect(family(other), HARMONY, ModelConfig(tool_format=name))
    assert syntax.tool_format[:2] == (name, "set")
    assert formats_of(syntax)[0] == name


def test_a_name_that_no_format_has() -> None:
    with pytest.raises(InvalidRequest, match="qwen3_coder, ") as caught:
        detected(NO_CALLS, tool_format="Hermes")
    assert caught.value.param == "tool_format"


@pytest.mark.parametrize(
    ("settings", "tool_format", "warnings"),
    [
        ({"harmony": True}, "harmony", 0),
        ({"muse_glimmer": True}, "muse_glimmer", 0),
        ({"harmony": True, "muse_glimmer": True}, "harmony", 0),
        ({"tool_format": "harmony"}, "harmony", 0),
        ({"tool_format": "glimmer"}, "muse_glimmer", 0),
        ({"tool_format": "harmony", "harmony": False}, None, 1),
        ({"harmony": True, "tool_format": "mistral"}, "harmony", 1),
        ({"harmony": True, "reasoning_start_token": "[A]", "reasoning_mode": "off"}, "harmony", 2),
    ],
)
def test_channels_by_setting(
    settings: dict[str, Any], tool_format: str | None, warnings: int, log_lines: list[str]
) -> None:
    syntax = detected(NO_CALLS, **settings)
    assert syntax.tool_format.value == tool_format
    assert syntax.dialect.name == {"harmony": "harmony", "muse_glimmer": "glimmer", None: "tags"}[tool_format]
    assert len(log_lines) == warnings


def test_channels_switched_off() -> None:
    assert detect(family("gpt_oss"), HARMONY, ModelConfig(harmony=False)).dialect.name == "tags"
    assert detect(family("glimmer"), GLIMMER, ModelConfig(muse_glimmer=False)).dialect.name == "tags"
