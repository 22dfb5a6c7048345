"""Families of models that write calls as JSON between strings of their own."""

from __future__ import annotations

from common.parsing.formats.base import Tools
from common.parsing.formats.tagged_json import TaggedJson
from common.parsing.json_calls import read_calls
from common.parsing.pieces import Reading
from common.parsing.scanner import Scanner


class Nemotron(TaggedJson):
    """
    <TOOLCALL>[{"name": NAME, "arguments": {...}}]</TOOLCALL>
    """

    names = ("nemotron", "nemotron_nano_v2")
    starts = ("<TOOLCALL>",)
    trigger = "<TOOLCALL>"
    end = "</TOOLCALL>"
    layout = ("[", "]")


class ToolCalls(TaggedJson):
    """
    <tool_calls>[{"name": NAME, "arguments": {...}}]</tool_calls>
    """

    names = ("jamba", "apriel", "hunyuan_a13b")
    starts = ("<tool_calls>",)
    trigger = "<tool_calls>"
    end = "</tool_calls>"
    layout = ("[", "]")


class MiniMaxM1(TaggedJson):
    """
    <tool_calls>
    {"name": NAME, "arguments": {...}}
    </tool_calls>
    """

    names = ("minimax_m1",)
    starts = ("<tool_calls>",)
    trigger = "<tool_calls>"
    end = "</tool_calls>"
    layout = ("\n", "\n")
    separator = "\n"


class Phi4Mini(TaggedJson):
    """
    <|tool_call|>[{"name": NAME, "arguments": {...}}]<|/tool_call|>
    """

    names = ("phi4_mini", "phi4_mini_json")
    starts = ("<|tool_call|>",)
    trigger = "<|tool_call|>"
    end = "<|/tool_call|>"
    end_is_optional = True
    layout = ("[", "]")


class Granite3(TaggedJson):
    """
    <|tool_call|>[{"name": NAME, "arguments": {...}}]
    """

    names = ("granite", "granite3")
    starts = ("<|tool_call|>",)
    trigger = "<|tool_call|>"
    layout = ("[", "]")


class InternLm2(TaggedJson):
    """
    <|action_start|><|plugin|>
    {"name": NAME, "parameters": {...}}<|action_end|>
    """

    names = ("internlm", "internlm2", "interns1")
    starts = ("<|action_start|><|plugin|>",)
    trigger = "<|action_start|><|plugin|>"
    end = "<|action_end|>"
    between = "\n"
    layout = ("\n", "")
    member_names = ("name", "parameters")


class LongCat(TaggedJson):
    """
    <longcat_tool_call>
    {"name": NAME, "arguments": {...}}
    </longcat_tool_call>
    """

    names = ("longcat",)
    starts = ("<longcat_tool_call>",)
    trigger = "<longcat_tool_call>"
    end = "</longcat_tool_call>"
    between = "\n"
    layout = ("\n", "\n")


class GigaChat3(TaggedJson):
    """
    <|function_call|>{"name": NAME, "arguments": {...}}

    The first versions write the role of a message instead: `function call<|role_sep|>`.
    """

    names = ("gigachat3",)
    starts = ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>")
    trigger = "<|function_call|>"
    between = ""

    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        yield from scanner.expect(*self.starts)
        yield from scanner.blanks()
        yield from read_calls(scanner, tools)


class Functools(TaggedJson):
    """
    functools[{"name": NAME, "arguments": {...}}]
    """

    names = ("functools", "firefunction_v2")
    starts = ("functools[",)
    trigger = "functools"
    layout = ("[", "]")


class CommandR(TaggedJson):
    """
    Action:
    ```json
    [
        {"tool_name": NAME, "parameters": {...}}
    ]```
    """

    names = ("command_r",)
    starts = ("Action:\n```json",)
    trigger = "Action:\n```json"
    end = "```"
    layout = ("\n[\n    ", "\n]")
    separator = ",\n    "
    member_names = ("tool_name", "parameters")


class CommandR7b(TaggedJson):
    """
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": NAME, "parameters": {...}}
    ]<|END_ACTION|>
    """

    names = ("command_r7b", "command_a", "cohere")
    starts = ("<|START_ACTION|>",)
    trigger = "<|START_ACTION|>"
    end = "<|END_ACTION|>"
    layout = ("[\n    ", "\n]")
    separator = ",\n    "
    member_names = ("tool_name", "parameters")
    number_name = "tool_call_id"
