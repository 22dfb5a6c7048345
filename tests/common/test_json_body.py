from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.json_body import read_json
from common.limits import MAX_BODY_MARKS, MAX_CONTAINERS, MAX_DEPTH


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\uD83D\uDE00 \u00e9"', "\U0001f600 é"),
        (rb'"\ud83d"', "?"),
        (rb'"\ude00"', "?"),
        (rb'"\ud83d\ud83d\ude00"', "?\U0001f600"),
        (rb'"\ud83d\ude00\ude00"', "\U0001f600?"),
        (rb'"\\ud83d"', "\\ud83d"),
        (rb'{"\ud83d": ["\udfff"]}', {"?": ["?"]}),
        (b'"\\u0000"', "\0"),
        (b"[1e308, -1]", [1e308, -1]),
        (b'\xef\xbb\xbf"x"', "x"),
    ],
)
def test_every_text_of_a_body_can_be_encoded(body: bytes, value: object) -> None:
    assert read_json(body) == value


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"1" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[0,{"a":', b"}]")])
def test_nesting_is_bounded(opening: bytes, closing: bytes) -> None:
    levels = opening.count(b"[") + opening.count(b"{")
    read_json(nested(MAX_DEPTH // levels, opening, closing))
    for depth in (MAX_DEPTH // levels + 1, 400, 100_000):
        with pytest.raises(InvalidRequest, match=f"{MAX_DEPTH} deep"):
            read_json(nested(depth, opening, closing))


def test_many_brackets_beside_each_other_are_not_deep() -> None:
    value: Any = [[], {}] * 1000
    assert read_json(json.dumps(value).encode()) == value


def test_the_number_of_lists_and_objects_is_bounded() -> None:
    most = MAX_CONTAINERS - 1  # beside the list that they stand in
    assert len(read_json(b"[" + b",".join([b"{}"] * most) + b"]")) == most
    for more in (b",".join([b"{}"] * (most + 1)), b",".join([b"[[]]"] * (most // 2 + 1))):
        with pytest.raises(InvalidRequest, match="more than 40,000 lists and objects"):
            read_json(b"[" + more + b"]")


def test_the_number_of_values_is_bounded_before_they_are_read() -> None:
    with pytest.raises(InvalidRequest, match="1,000,001 commas and opening brackets"):
        read_json(b"," * MAX_BODY_MARKS + b"[")  # which is no JSON


def test_what_is_no_text_or_no_number_is_refused() -> None:
    half_pair = b'"\xed\xa0\x80"'
    for body in (
        b'"\xff"',
        b"9" * 5000,
        half_pair,
        '"x"'.encode("utf-16"),
        '"\ud83d"'.encode("utf-16", "surrogatepass"),
    ):
        with pytest.raises(InvalidRequest, match="cannot be read as JSON"):
            read_json(body)


def test_what_is_no_json_is_told_with_its_place() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        read_json(b'{"a": }')
    assert caught.value.pos == 6
