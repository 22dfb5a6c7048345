from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.templating import TEMPLATE_DIR, ChatTemplate, find_template, list_templates

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = message['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- set ns.last = loop.index0 %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
            {%- for name, value in call.function.arguments.items() %}
                {%- if name == 'n' %}{%- break %}{%- endif %}
                {{- name }}={{ value }}
            {%- endfor %}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}{{- ns.last }}
"""
BLOCKS = """
{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}{% set leaked = 1 %}
        {% endgeneration %}
    {% else %}
{{ message | tojson(indent=2) }}
{{ message | tojson(sort_keys=true, separators=(',', ':')) }} {{ message | tojson(ensure_ascii=true) }}
    {% endif %}
{% endfor %}
{{ leaked is defined }} {{ dict(a=1) | tojson }}
"""
TOOLS = [
    {"type": "function", "function": {"strict": True, "name": "f", "description": "é <&> '\"", "x": {"b": 1, "a": 2}}}
]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"path": "/srv/é", "n": 1.0, "z": None}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <kind> & 'brief' "},
    {"role": "user", "content": "hé\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
    {"role": "assistant", "content": "Done."},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("source", [LLAMA, QWEN, BLOCKS, *(path.read_text() for path in TEMPLATE_DIR.glob("*.jinja"))])
def test_renders_as_transformers_does(
    source: str, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    [expected], _ = utils.render_jinja_template(
        conversations=[CONVERSATION],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
        **tokens,
    )
    rendered = ChatTemplate("t", source, tokens).render(
        CONVERSATION, {"tools": tools, "enable_thinking": False}, add_generation_prompt=add_generation_prompt
    )
    assert rendered == expected


def test_tojson_keeps_order_and_characters() -> None:
    template = ChatTemplate("t", "{{ t | tojson }}")
    assert template.render([], {"t": {"b": 1, "a": "é<&"}}) == '{"b": 1, "a": "é<&"}'


def test_the_servers_names_win_over_variables() -> None:
    template = ChatTemplate("t", "{{ messages | length }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user"}], {"messages": [], "bos_token": "x"}) == "1<s>"


def test_strftime_now() -> None:
    assert ChatTemplate("t", "{{ strftime_now('%Y') }}").render([]).isdigit()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ {}['a']['b'] }}", "'a'"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match="mine") as caught:
        ChatTemplate("mine", source).render([{"role": "user", "content": "hi"}])
    assert said in caught.value.message
    assert caught.value.param == "messages"


# --- continuing the last message -----------------------------------------------------------------------------------

TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
KEEPING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (KEEPING, "Well, ", "<user>hi</><assistant>Well, "),
        (KEEPING, " Well", "<user>hi</><assistant> Well"),
        (TRIMMING, "Well, ", "<user>hi</><assistant>Well,"),
        (TRIMMING, "Well", "<user>hi</><assistant>Well"),
    ],
)
def test_the_prompt_ends_inside_the_last_message(source: str, content: str, expected: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    rendered = ChatTemplate("t", source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert messages[1]["content"] == content


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (KEEPING, []),
        (KEEPING, [{"role": "assistant"}]),
        (KEEPING, [{"role": "assistant", "content": ""}]),
        ("nothing", [USER]),
        ("{{ messages[0].content | upper }}", [USER]),
    ],
)
def test_what_cannot_be_continued(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("t", source).render(messages, continue_final_message=True)


# --- discovery ----------------------------------------------------------------------------------------------------


def write(directory: Path, **files: object) -> None:
    for name, content in files.items():
        if isinstance(content, str):
            (directory / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def found(directory: Path, name: str | None = None) -> tuple[str, str] | None:
    template = find_template(directory, name)
    return None if template is None else (template.name, template.source)


def test_the_first_place_wins(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    write(tmp_path, tokenizer_config={"chat_template": "config"})
    assert found(tmp_path) == ("from_tokenizer_config", "config")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}', encoding="utf-8")
    assert found(tmp_path) == ("chat_template", "json")
    write(tmp_path, chat_template="file")
    assert found(tmp_path) == ("chat_template", "file")
    write(tmp_path, tabby_template="tabby")
    assert found(tmp_path) == ("tabby_template", "tabby")
    template = find_template(tmp_path, "chatml")
    assert template is not None
    assert template.source == (TEMPLATE_DIR / "chatml.jinja").read_text(encoding="utf-8")


def test_a_list_of_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(tmp_path, tokenizer_config={"chat_template": templates})
    assert found(tmp_path) == ("default", "one")
    assert found(tmp_path, "tool_use") == ("tool_use", "two")


@pytest.mark.parametrize("name", ["none-such", "../chatml", "/etc/passwd", "a.b"])
def test_a_template_that_is_asked_for_must_exist(tmp_path: Path, name: str) -> None:
    write(tmp_path, chat_template="the model's own")
    with pytest.raises(InvalidRequest) as caught:
        find_template(tmp_path, name)
    assert caught.value.param == "prompt_template"


def test_what_does_not_compile_is_skipped_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tabby_template.jinja").write_text("{% if", encoding="utf-8")
    (tmp_path / "chat_template.json").write_text("{broken", encoding="utf-8")
    write(tmp_path, tokenizer_config={"chat_template": "good"})
    assert found(tmp_path) == ("from_tokenizer_config", "good")
    with pytest.raises(InvalidRequest, match="line 1"):
        find_template(tmp_path, "tabby_template", template_dir=tmp_path)


def test_names_with_and_without_suffix(tmp_path: Path) -> None:
    (tmp_path / "v1.5.jinja").write_text("dots", encoding="utf-8")
    for name in ("v1.5", "v1.5.jinja"):
        template = find_template(tmp_path, name, template_dir=tmp_path)
        assert template is not None
        assert (template.name, template.source) == ("v1.5", "dots")
    assert list_templates(tmp_path) == ["v1.5"]


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    }
    write(tmp_path, tokenizer_config=config)
    template = find_template(tmp_path)
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.render([]) == "<s></s>"
    assert template.begins_with_bos("<s>x")
    assert not template.begins_with_bos("x<s>")
    assert not ChatTemplate("t", "").begins_with_bos("x")


def test_a_template_in_another_encoding_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "tabby_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    (tmp_path / "chat_template.jinja").write_text("mine", encoding="utf-8")
    found = find_template(tmp_path)
    assert found is not None
    assert found.source == "mine"
