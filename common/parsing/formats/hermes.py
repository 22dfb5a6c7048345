"""Hermes, Qwen 2.5, Qwen 3, Granite 4, SmolLM 3 and many more: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from common.parsing.formats.tagged_json import TaggedJson


class Hermes(TaggedJson):
    """
    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>
    """

    names = ("hermes", "qwen2_5", "qwen3", "granite4", "smollm3", "ernie4_5", "mimo")
    starts = ("<tool_call>",)
    trigger = "<tool_call>"
    between = "\n"
    end = "</tool_call>"
    layout = ("\n", "\n")
