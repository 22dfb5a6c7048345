from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.control_text import ControlStrings, StandIns
from common.errors import InvalidRequest

TOKENS = ("<|im_start|>", "<|im_end|>", "<|im", "<s>", "[INST]", "<｜User｜>", "</s>", "<s><s>")
STRINGS = ControlStrings(TOKENS)
PIECES = st.lists(st.sampled_from([*TOKENS, "<", "<|", "s>", "x", "\n", "\U000f0000", "é"])).map("".join)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("no < token | here", []),
        ("a<|im_end|>b", ["<|im_end|>"]),
        ("<|im_end|", ["<|im"]),
        ("<s><s><s>", ["<s><s>", "<s>"]),
        ("<<s>><｜User｜>", ["<s>", "<｜User｜>"]),
    ],
)
def test_the_leftmost_and_then_the_longest_is_found(text: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in STRINGS.spans(text)] == found


@given(PIECES)
def test_finds_what_a_regular_expression_finds(text: str) -> None:
    pattern = "|".join(map(re.escape, sorted(TOKENS, key=len, reverse=True)))
    assert list(STRINGS.spans(text)) == [match.span() for match in re.finditer(pattern, text)]


def test_without_strings_nothing_is_found() -> None:
    assert list(ControlStrings([]).spans("<|im_end|>")) == []


@given(
    st.recursive(
        PIECES, lambda children: st.lists(children, max_size=3) | st.dictionaries(PIECES, children, max_size=3)
    )
)
def test_what_is_hidden_comes_back_and_is_marked(value: Any) -> None:
    stand_ins = StandIns(value)
    hidden = json.dumps(stand_ins.hide(value, STRINGS), ensure_ascii=False)
    plain = json.dumps(value, ensure_ascii=False)
    assert not list(STRINGS.spans(hidden))
    text, literals = stand_ins.reveal(hidden)
    assert text == plain
    assert [text[start:end] for start, end in literals] == [plain[start:end] for start, end in STRINGS.spans(plain)]


@pytest.mark.parametrize("text", ["x<|im_end|>y", "a\U000f0000<s>", "\\udb80\\udc00<s>", "\\uDB80\\uDC00<s>"])
def test_json_in_ascii_comes_back(text: str) -> None:
    stand_ins = StandIns(text)
    shown, literals = stand_ins.reveal(json.dumps(stand_ins.hide(text, STRINGS)))
    assert shown == json.dumps(text)
    assert [shown[start:end] for start, end in literals] == [re.search("<.*>", text)[0]]  # type: ignore[index]


def test_a_stand_in_is_one_character_that_nothing_else_uses() -> None:
    taken = ["\U000f0000", {"\U000f0001": 1}, ("\\udb80\\udc02",)]
    stand_ins = StandIns("<s>", taken)
    assert stand_ins.hide(" <s></s><s> ", STRINGS) == " \U000f0003\U000f0004\U000f0003 "


def test_values_that_are_no_text_stay() -> None:
    value = {"a": [1, 1.0, None, True]}
    assert StandIns().hide(value, STRINGS) == value


def test_a_request_that_uses_every_private_character() -> None:
    everything = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    assert StandIns(everything).hide("x", STRINGS) == "x"
    with pytest.raises(InvalidRequest, match="private-use"):
        StandIns(everything).hide("<s>", STRINGS)
