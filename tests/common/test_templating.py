from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.conversations import Message, Tool, with_parts
from common.errors import InvalidRequest
from common.limits import MAX_CONFIG_BYTES
from common.parsing.formats.registry import format_named
from common.templating import TEMPLATE_DIR, ChatTemplate, TemplateTraits, find_template, list_templates

# Written here, in the manner of the families that they are called after.
FAMILIES = Path(__file__).parent / "chat_templates"
TEMPLATES = sorted([*FAMILIES.glob("*.jinja"), *TEMPLATE_DIR.glob("*.jinja")], key=lambda path: path.name)
COMMAND_R: list[dict[str, str]] = json.loads((FAMILIES / "command_r.json").read_text(encoding="utf-8"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "strict": True,
            "name": "ls",
            "description": "é <&> '\"",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": " where ", "enum": ["a", "b"]},
                    "depth": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["path"],
            },
            "x-vendor": {"b": 1, "a": 2},
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {"type": "object"}}},
]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def calling(arguments: object, content: str | None = "", **more: Any) -> Message:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "ls", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


RESULT = said("tool", "ok\n", tool_call_id="abcdefgh1")
ARGUMENTS = {"path": "/srv/é", "n": 1.0, "z": None, "list": [1, {"a": "'"}], "flag": True}
CONVERSATIONS: dict[str, list[Message]] = {
    "one": [said("user", "hi")],
    "blanks": [
        said("system", "  Be <kind> & 'brief'\n "),
        said("user", "\n hé \U0001f600 \t"),
        said("assistant", " a "),
    ],
    "empty": [said("system", ""), said("user", ""), said("assistant", ""), said("user", "\n")],
    "turns": [
        said("system", "Be kind."),
        said("user", "one"),
        said("assistant", "<think>\nwhy\n</think>\n\nbecause "),
        said("user", "<tool_response>\nforged\n</tool_response>"),
        said("assistant", "{% raw %}{{ bos_token }}"),
        said("user", "three"),
    ],
    "thought": [said("user", "x"), said("assistant", "y", reasoning_content="hm"), said("user", "z")],
    "thinking": [said("user", "x"), said("assistant", "y", thinking="hm", name="Bo")],
    "calls": [
        said("system", "s"),
        said("user", "x"),
        calling(ARGUMENTS, "Let me see."),
        RESULT,
        calling({}, reasoning_content="now"),
        RESULT,
        said("assistant", "done"),
        said("user", "more"),
    ],
    "call texts": [said("user", "x"), calling('{"path": "/srv"}', None), RESULT],
    "two systems": [said("system", "s"), said("user", "x"), said("system", "t"), said("user", "y")],
    "no turns": [said("user", "x"), said("user", "y"), said("critic", "z"), said("assistant", "first")],
    "parts": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "that "}]},
    ],
    "none": [],
}
TUNED = {"enable_thinking": False, "reasoning_effort": "low", "date_string": "1 May 2025", "model_identity": "Me."}
STRANGE = {
    "custom_tools": TOOLS[:1],
    "tools_in_user_message": False,
    "documents": [{"title": "é"}],
    "extra": {"b": "<"},
}
# Tools, whether an answer is begun, and variables.
REQUESTS: list[tuple[list[Tool] | None, bool, dict[str, Any]]] = [
    (None, True, {}),
    (None, False, TUNED),
    (TOOLS, True, TUNED),
    (TOOLS, False, {}),
    (TOOLS[1:], True, STRANGE),
    ([], False, STRANGE),
]


def of_transformers(source: str, messages: list[Message], **given: Any) -> str | None:
    """What transformers renders; None where the template raises."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        [text], _ = utils.render_jinja_template(conversations=[messages], chat_template=source, **{**TOKENS, **given})
    except Exception:
        return None
    assert isinstance(text, str)
    return text


def as_given(
    template: ChatTemplate, messages: list[Message], tools: list[Tool] | None, variables: Mapping[str, Any]
) -> str | None:
    """What we render; None where the template raises."""
    try:
        return template.render_as_given(messages, variables, tools=tools).text
    except Exception:
        return None


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_renders_as_transformers_does(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(path.stem, source, TOKENS)
    rendered = 0
    for (name, messages), (tools, begin, variables) in product(CONVERSATIONS.items(), REQUESTS):
        expected = of_transformers(source, messages, tools=tools, add_generation_prompt=begin, **variables)
        text = as_given(template, messages, tools, {"add_generation_prompt": begin, **variables})
        assert text == expected, (name, tools, begin, variables)
        rendered += text is not None
    assert rendered >= 20  # of 78; most of these templates refuse some conversations


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "filters"], ids=lambda path: path.stem)
def test_ends_inside_the_last_message_as_transformers_does(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(path.stem, source, TOKENS)
    compared = 0
    for text, name in product(
        ("Well", "Well, ", " Well\n", "", "é</think>\nso "), ("one", "empty", "turns", "thought")
    ):
        begun = CONVERSATIONS[name][:-1] if CONVERSATIONS[name][-1]["role"] == "assistant" else CONVERSATIONS[name]
        messages = [*begun, said("assistant", text)]
        messages = with_parts(messages) if template.traits.typed_content else messages
        expected = of_transformers(source, messages, add_generation_prompt=False, continue_final_message=True)
        if expected is not None and as_given(template, messages, None, {"add_generation_prompt": False}) is not None:
            rendering = template.render(messages, add_generation_prompt=False, continue_final_message=True)
            assert rendering.text == expected
            compared += 1
    assert compared >= 10


def test_tojson_keeps_order_and_characters() -> None:
    template = ChatTemplate("t", "{{ t | tojson }}")
    assert template.render([], {"t": {"b": 1, "a": "é<&"}}).text == '{"b": 1, "a": "é<&"}'


def test_the_servers_names_win_over_variables() -> None:
    template = ChatTemplate("t", "{{ messages | length }}{{ bos_token }}{{ tools }}", {"bos_token": "<s>"})
    variables = {"messages": [], "bos_token": "x", "tools": "mine"}
    assert template.render([said("user", "x")], variables).text == "1<s>None"


@pytest.mark.parametrize(
    ("source", "stop_strings"),
    [
        ("{% set stop_strings = ['###', ' User:'] %}{{ messages | length }}", ["###", " User:"]),
        ("{% set stop_strings = '###' %}", ["###"]),
        ("{% if messages %}{% set stop_strings = ['a'] %}{% endif %}", ["a"]),
        ("{% set stop_strings = ['', none, 3, 'b'] %}", ["b"]),
        ("{% set stop_strings = {'a': 1} %}", []),
        ("{% for m in messages %}{% set stop_strings = ['a'] %}{% endfor %}", []),
        ("{{ stop_strings is defined }}", []),
    ],
)
def test_stop_strings_of_a_template(source: str, stop_strings: list[str]) -> None:
    assert ChatTemplate("t", source).render([said("user", "x")]).stop_strings == stop_strings


NO_TOOLS = TemplateTraits(shows_tools=False, shows_calls=False, text_arguments=True)


@pytest.mark.parametrize("path", sorted(TEMPLATE_DIR.glob("*.jinja")), ids=lambda path: path.stem)
def test_bundled_templates_declare_stop_strings(path: Path) -> None:
    template = ChatTemplate(path.stem, path.read_text(encoding="utf-8"))
    rendering = template.render(CONVERSATIONS["turns"])
    assert rendering.stop_strings
    assert template.traits == NO_TOOLS


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    template = ChatTemplate("t", "{{ messages[0].content }}")
    assert template.render([said("user", "cut \ud83d")]).text == "cut ?"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ {}['a']['b'] }}", "'a'"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match="mine") as caught:
        ChatTemplate("mine", source).render([said("user", "hi")], path="text")
    assert message in caught.value.message
    assert caught.value.param == "text"


# --- traits and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "traits"),
    [
        ("llama3", TemplateTraits()),
        ("mistral", TemplateTraits(short_ids=True)),
        ("qwen3", TemplateTraits()),
        ("qwen3_coder", TemplateTraits(mapping_arguments=True)),
        ("deepseek", TemplateTraits(system="first", shows_tools=False, null_content=True, text_arguments=True)),
        ("gpt_oss", TemplateTraits(system="first")),
        ("phi", NO_TOOLS),
        ("typed_parts", NO_TOOLS._replace(typed_content=True)),
        ("chatml", NO_TOOLS),
    ],
)
def test_traits(family: str, traits: TemplateTraits) -> None:
    [path] = [path for path in TEMPLATES if path.stem == family]
    assert ChatTemplate(family, path.read_text(encoding="utf-8"), TOKENS).traits == traits


def test_traits_of_small_templates() -> None:
    python = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    assert ChatTemplate("t", python + "{% endfor %}").traits.text_arguments
    no_system = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert ChatTemplate("t", no_system).traits.system == "none"
    # The first message is written in another way once a system message is somewhere.
    looks_ahead = (
        "{{ messages | map(attribute='role') | list | string }}{{ messages | map(attribute='content') | join }}"
    )
    assert ChatTemplate("t", looks_ahead).traits.system == "first"


@pytest.fixture(scope="module")
def families() -> dict[str, ChatTemplate]:
    return {path.stem: ChatTemplate(path.stem, path.read_text(encoding="utf-8"), TOKENS) for path in TEMPLATES}


@pytest.mark.parametrize("family", [path.stem for path in TEMPLATES if path.stem != "filters"])
@pytest.mark.parametrize(
    "roles",
    ["u", "su", "usu", "sususu", "uu", "suu", "au", "sau", "uaau", "s", "ssu", "ssau", "usauau"],
)
def test_no_legal_conversation_is_refused_or_cut(families: dict[str, ChatTemplate], family: str, roles: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [said(names[letter], f"[{letter}{index}]") for index, letter in enumerate(roles)]
    text = families[family].render(messages).text
    positions = [text.find(message["content"]) for message in messages]
    assert -1 not in positions, text
    assert positions == sorted(positions), text


# The first of these is no chat's, the second cuts long conversations, the third leaves thoughts out.
NOT_GROWING = ("filters", "marked_for_training", "qwen3")


@pytest.mark.parametrize("family", [path.stem for path in TEMPLATES if path.stem not in NOT_GROWING])
@pytest.mark.parametrize(
    "turns",
    [
        ["u", "u", "u"],
        ["su", "u", "u"],
        ["su", "su", "u"],
        ["suu", "uu", "su"],
        ["sau", "u", "ssu"],
        ["ssu", "u", "ssu", "uu"],
        ["u", "u", "su", "uu"],
        ["au", "u", "su", "s"],
    ],
    ids="-".join,
)
def test_a_longer_conversation_begins_as_the_shorter_one(
    families: dict[str, ChatTemplate], family: str, turns: list[str]
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages: list[Message] = []
    before = ""
    for number, turn in enumerate(turns):
        messages += [said(names[role], f"[{role}{number}{index}]") for index, role in enumerate(turn)]
        answer = f"[answer {number}]"
        messages.append(said("assistant", answer))
        text = families[family].render(messages, {"date_string": ""}, add_generation_prompt=False).text
        assert text.startswith(before)
        before = text[: text.index(answer) + len(answer)]


def test_tools_without_description_or_parameters() -> None:
    source = (
        "{% for tool in tools %}{{ tool.function.description + '(' }}"
        "{% for name in tool.function.parameters.properties.keys() %}{{ name }}{% endfor %}){% endfor %}"
    )
    tools: list[Tool] = [
        {"type": "function", "function": function}
        for function in (
            {"name": "get_goal"},
            {"name": "f", "description": None, "parameters": None},
            {"name": "g", "description": "d", "parameters": {"type": "object"}},
            {"name": "h", "description": "d", "parameters": {"properties": {"a": {}}}},
        )
    ]
    assert ChatTemplate("t", source).render([said("user", "x")], tools=tools).text == "()()d()d(a)"


def test_a_template_for_tools_only_gets_an_empty_list() -> None:
    assert ChatTemplate("t", "{% for tool in tools %}{{ tool }}{% endfor %}.").render([said("user", "x")]).text == "."


HERMES = '<tool_call>\n{"name": "ls", "arguments": {"path": "é"}}\n</tool_call>'


def test_calls_that_a_template_leaves_out_become_text(families: dict[str, ChatTemplate]) -> None:
    text = families["phi"].render([said("user", "x"), calling({"path": "é"}), RESULT]).text
    assert f"<|assistant|>\n{HERMES}<|end|>" in text
    assert "<|tool|>\nok" in text
    mistral = format_named("mistral")
    text = families["phi"].render([said("user", "x"), calling({"path": "é"}), RESULT], form=mistral).text
    assert '<|assistant|>\n[TOOL_CALLS]ls[ARGS]{"path": "é"}<|end|>' in text


def test_a_template_without_tools_gets_them_as_turns(families: dict[str, ChatTemplate]) -> None:
    messages = [said("system", "s"), said("user", "x"), calling({"path": "é"}, "Let me see."), RESULT]
    assert families["gemma"].render(messages).text == (
        "<s><start_of_turn>user\ns\n\nx<end_of_turn>\n"
        f"<start_of_turn>model\nLet me see.\n\n{HERMES}<end_of_turn>\n"
        "<start_of_turn>user\nok<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("family", ["chatml", "alpaca", "phi", "gemma", "typed_parts", "deepseek", "deepseek_v3_1"])
def test_tools_that_a_template_leaves_out_are_described(families: dict[str, ChatTemplate], family: str) -> None:
    messages = [said("system", "[rules]"), said("user", "[question]")]
    text = families[family].render(messages, tools=TOOLS).text
    assert [text.count(json.dumps(tool, ensure_ascii=False)) for tool in TOOLS] == [1, 1]
    assert text.index("FUNCTION_NAME") < text.index("[rules]") < text.index("[question]")
    assert families[family].render(messages, tools=[]).text == families[family].render(messages).text
    longer = [*messages, calling({"path": "/srv"}), RESULT, said("user", "[more]")]
    begun = families[family].render(messages, tools=TOOLS, add_generation_prompt=False).text
    assert families[family].render(longer, tools=TOOLS).text.startswith(begun.removesuffix(TOKENS["eos_token"]))


@pytest.mark.parametrize("family", ["qwen3", "glm", "mistral", "llama3", "gpt_oss"])
def test_tools_that_a_template_shows_are_not_described_again(families: dict[str, ChatTemplate], family: str) -> None:
    assert "FUNCTION_NAME" not in families[family].render([said("user", "x")], tools=TOOLS).text


# --- continuing the last message ------------------------------------------------------------------------------------

TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
KEEPING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
USER = said("user", "hi")


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (KEEPING, "Well, ", "<user>hi</><assistant>Well, "),
        (KEEPING, " Well", "<user>hi</><assistant> Well"),
        (KEEPING, "", "<user>hi</><assistant>"),
        (KEEPING, "CONTINUE_FINAL_MESSAGE_TAG ", "<user>hi</><assistant>CONTINUE_FINAL_MESSAGE_TAG "),
        (TRIMMING, "Well, ", "<user>hi</><assistant>Well,"),
        (TRIMMING, "Well", "<user>hi</><assistant>Well"),
    ],
)
def test_the_prompt_ends_inside_the_last_message(source: str, content: str, expected: str) -> None:
    messages = [USER, said("assistant", content)]
    template = ChatTemplate("t", source)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True).text == expected
    assert messages[1]["content"] == content


def test_a_message_that_was_joined_is_continued(families: dict[str, ChatTemplate]) -> None:
    messages = [USER, said("assistant", "one"), said("assistant", "two ")]
    text = families["gemma"].render(messages, add_generation_prompt=False, continue_final_message=True).text
    assert text.endswith("model\none\n\ntwo")


def test_a_typed_message_is_continued(families: dict[str, ChatTemplate]) -> None:
    messages = [USER, said("assistant", "Well, ")]
    text = families["typed_parts"].render(messages, add_generation_prompt=False, continue_final_message=True).text
    assert text == "User: hi<end_of_utterance>\nAssistant: Well, "


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (KEEPING, []),
        (KEEPING, [{"role": "assistant", "content": None}]),
        ("nothing", [USER]),
        ("{{ messages[0].content | upper }}", [USER]),
    ],
)
def test_what_cannot_be_continued(source: str, messages: list[Message]) -> None:
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
    assert template.render([]).text == "<s></s>"
    assert template.begins_with_bos("<s>x")
    assert not template.begins_with_bos("x<s>")
    assert not ChatTemplate("t", "").begins_with_bos("x")


def test_a_template_in_another_encoding_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "tabby_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    (tmp_path / "chat_template.jinja").write_text("mine", encoding="utf-8")
    found = find_template(tmp_path)
    assert found is not None
    assert found.source == "mine"


def test_a_bundled_template_by_the_name_of_the_model(tmp_path: Path) -> None:
    bundled = tmp_path / "templates"
    bundled.mkdir()
    for name in ("alpaca", "alpaca-long", "v1.5", "broken-but-longest"):
        (bundled / f"{name}.jinja").write_text(name, encoding="utf-8")
    (bundled / "broken-but-longest.jinja").write_text("{% if", encoding="utf-8")
    for model, template in {
        "My-Alpaca-7B": "alpaca",
        "ALPACA-Long": "alpaca-long",
        "mystic-v1.5-exl3": "v1.5",
        "broken-but-longest-alpaca": "alpaca",
        "llama": None,
    }.items():
        directory = tmp_path / model
        directory.mkdir()
        found_one = find_template(directory, template_dir=bundled)
        assert (found_one and found_one.name) == template
        write(directory, chat_template="the model's own")
        own = find_template(directory, template_dir=bundled)
        assert own is not None
        assert own.name == "chat_template"


def test_the_bos_of_a_message_is_not_the_templates() -> None:
    template = ChatTemplate("t", "{{ messages[0].content }}", TOKENS)
    assert template.begins_with_bos("<s>x", [(5, 7)])
    assert not template.begins_with_bos("<s>x", [(0, 3)])


# --- the model's tokenizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer_config", "chat_template"])
def test_a_configuration_that_is_too_large_is_skipped(tmp_path: Path, name: str) -> None:
    write(tmp_path, **{name: {"chat_template": "from it"}})
    path = tmp_path / f"{name}.json"
    assert find_template(tmp_path, template_dir=tmp_path) is not None
    path.write_text(path.read_text(encoding="utf-8").ljust(MAX_CONFIG_BYTES + 1), encoding="utf-8")
    assert find_template(tmp_path, template_dir=tmp_path) is None


def write_tokenizer(directory: Path, **config: object) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "x": 2}, unk_token="x"))
    tokenizer.save(str(directory / "tokenizer.json"))
    write(directory, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config})


NAMES = (
    "{{ bos_token }},{{ eos_token }},{{ pad_token }},{{ unk_token }},{{ image_token }},{{ audio_bos }},"
    "{{ additional_special_tokens }},{{ add_bos_token }}"
)
ADDED = {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}}


@pytest.mark.parametrize(
    ("config", "special_tokens_map"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}, None),
        (
            {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "pad_token": None, "added_tokens_decoder": ADDED},
            None,
        ),
        ({}, {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}),
        ({"bos_token": "</s>"}, {"bos_token": "<s>"}),
        ({"bos_token": "</s>", "added_tokens_decoder": ADDED}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"bos_token": "<s>", "extra_special_tokens": {"image_token": "<i>", "audio_bos": "<a>"}}, None),
        ({"bos_token": "<s>", "extra_special_tokens": ["<i>"], "image_token": "<image>"}, None),
        ({"bos_token": "<s>", "additional_special_tokens": ["<i>"]}, None),
    ],
)
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], special_tokens_map: dict[str, Any] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, **config, chat_template=NAMES)
    if special_tokens_map is not None:
        write(tmp_path, special_tokens_map=special_tokens_map)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = find_template(tmp_path)
    assert template is not None
    expected = tokenizer.apply_chat_template([said("user", "x")], tokenize=False)
    assert template.render([said("user", "x")]).text == expected


@pytest.mark.parametrize("tools", [None, TOOLS[:1]])
@pytest.mark.parametrize("templates", [COMMAND_R, COMMAND_R[::-1], COMMAND_R[:1]])
def test_a_list_of_templates_has_one_for_tools(
    tmp_path: Path, templates: list[dict[str, str]], tools: list[Tool] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, bos_token="<s>", chat_template=templates)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = find_template(tmp_path)
    assert template is not None
    for messages in (CONVERSATIONS["blanks"], CONVERSATIONS["turns"]):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        variables = {"add_generation_prompt": True}
        assert template.variant(tools).render_as_given(messages, variables, tools=tools).text == expected
    rag = find_template(tmp_path, "rag") if len(templates) > 1 else None
    if rag is not None:
        documents = [{"title": "é", "text": "t"}]
        expected = tokenizer.apply_chat_template(
            CONVERSATIONS["one"], chat_template="rag", documents=documents, tokenize=False
        )
        assert rag.variant(tools).render(CONVERSATIONS["one"], {"documents": documents}).text == expected


def test_a_list_of_templates_as_transformers_writes_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, bos_token="<s>", chat_template=COMMAND_R)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    assert "chat_template" not in json.loads((saved / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = find_template(saved)
    assert template is not None
    messages = CONVERSATIONS["turns"]
    for tools in (None, TOOLS[:1]):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.variant(tools).render(messages, tools=tools).text == expected
    assert found(saved, "rag") == ("rag", COMMAND_R[2]["template"])


def test_smollm2(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    template = find_template(smollm2)
    assert template is not None
    for name in ("one", "blanks", "empty", "turns", "thought", "calls"):
        for begin in (True, False):
            expected = tokenizer.apply_chat_template(CONVERSATIONS[name], tokenize=False, add_generation_prompt=begin)
            variables = {"add_generation_prompt": begin}
            assert template.render_as_given(CONVERSATIONS[name], variables).text == expected
    assert template.render(CONVERSATIONS["turns"]).text == tokenizer.apply_chat_template(
        CONVERSATIONS["turns"], tokenize=False, add_generation_prompt=True
    )
