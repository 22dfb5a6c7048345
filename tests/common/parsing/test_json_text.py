from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.formats.base import Schema, Tool
from common.parsing.json_text import JsonReader, escape, quoted, read_object
from common.parsing.scanner import Scanner
from tests.common.parsing.answers import chunk_sizes
from tests.common.parsing.reading import LS, Ending, Result, mutated, read_all, strict, values

STRING = {"type": "string"}
INTEGER = {"type": "integer"}


def read(
    text: str,
    schema: Schema = True,
    sizes: Sequence[int] = (1,),
    ending: Ending = "complete",
    **options: Any,
) -> Result:
    return read_all(lambda scanner: JsonReader(scanner, schema, **options).value(schema), text, sizes, ending)


def mended(text: str, schema: Schema = True, ending: Ending = "complete", **options: Any) -> str | None:
    """What becomes of a text, wherever it is cut in two and char by char; None for what is no JSON."""
    whole = read(text, schema, [len(text)], ending, **options)
    joined = "".join(whole.pieces)
    for sizes in ([1], *([size, len(text)] for size in range(1, len(text)))):
        again = read(text, schema, sizes, ending, **options)
        assert ("".join(again.pieces), again.failed) == (joined, whole.failed), sizes
    if whole.failed:
        return None
    strict(joined)
    return joined


@given(value=values, sizes=chunk_sizes, indent=st.sampled_from([None, 0, 3]), as_ascii=st.booleans())
def test_json_passes_as_it_is(value: Any, sizes: Sequence[int], indent: int | None, as_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=as_ascii)
    result = read(text, sizes=sizes)
    assert ("".join(result.pieces), result.failed) == (text, False)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,  "b" : [ 2.50 ,1E+3,-0, {} , [ ] ]\r\n}',
        '{"a": "\\u00e9\\/\\" \\ud83d \\u0000", "a": null}',
        '"\x7f\u2028é😀"',
        "123456789012345678901234567890.0",
    ],
)
def test_spelling_and_blanks_stay(text: str) -> None:
    assert mended(text) == text


def test_a_string_arrives_while_it_is_generated() -> None:
    scanner = Scanner()
    reading = JsonReader(scanner).value()
    read_so_far = ""
    for character in '{"a": ["some text':
        scanner.feed(character)
        read_so_far += "".join(iter(lambda: next(reading), None))
    assert read_so_far == '{"a": ["some text'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("{'a': 'it\\'s \"b\"'}", '{"a": "it\'s \\"b\\""}'),
        ('{a: 1, Content-Type: "x", $b.c_1 :2}', '{"a": 1, "Content-Type": "x", "$b.c_1" :2}'),
        ('{"a"=1, b = [2]}', '{"a":1, "b" : [2]}'),
        ('{"a": [1, 2, ], }', '{"a": [1, 2 ] }'),
        ("[True, False, None]", "[true, false, null]"),
        ('{"a": NaN, "b": -Infinity, "c": [inf, +nan]}', '{"a": null, "b": null, "c": [null, null]}'),
        ("[+1, .5, 5., 007, -1_000.5, 0x1F, 1_0e5]", "[1, 0.5, 5.0, 7, -1000.5, 31, 10e5]"),
        ('"a\n\tb\x00"', '"a\\n\\tb\\u0000"'),
        ('"C:\\dir \\x41 \\U0001F600 \\uZZ \\xg \\U99999999"', '"C:\\\\dir A 😀 \\\\uZZ \\\\xg \\\\U99999999"'),
        ('"""a "b"\nc"""', '"a \\"b\\"\\nc"'),
        ("'''it's'''", '"it\'s"'),
        ('{"a": "say "hi" now", "b": "x"}', '{"a": "say \\"hi\\" now", "b": "x"}'),
        ('{"a": "he said "no""}', '{"a": "he said \\"no\\""}'),
        ("{'a': 'it's' }", '{"a": "it\'s" }'),
        ('{"a":\u00a01}', '{"a": 1}'),
        ('{"a": {"b": ["c"', '{"a": {"b": ["c"]}}'),
        ('{"a": 1,', '{"a": 1}'),
        ("'\\ud83d'", '"\\ud83d"'),
    ],
)
def test_what_is_evident_is_mended(text: str, right: str) -> None:
    assert mended(text) == right


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "{]", "{1}", '{"a"}', '{"a" 1}', '{"a": 1 "b": 2}', "[1 2]", '["a" "b"]', "[,]", '{"a": }', "-"),
        *("1.2.3", "2024-01-02", '"a', "'a\\", "(1)", "nul", "{,}", "1" * 1001, "{:1}", "<a>", "[1}", '{"a": 1]'),
    ],
)
def test_the_rest_is_no_json(text: str) -> None:
    assert mended(text) is None


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": 1,', '["b"', '{"a": [1]'])
def test_nothing_is_closed_where_the_text_is_cut(text: str) -> None:
    assert mended(text) is not None
    assert mended(text, ending="cut") is None


def test_what_stops_a_call_closes_it() -> None:
    assert mended('{"a": [{"b": "x"\n</tool_call>', stops=["</tool_call>"]) == '{"a": [{"b": "x"\n}]}'
    assert mended('{"a": 1</tool_call>', stops=["</tool_call>"], ending="cut") == '{"a": 1}'
    assert mended('{"a": "</tool_call>"}', stops=["</tool_call>"]) == '{"a": "</tool_call>"}'
    assert mended('{"a": </tool_call>', stops=["</tool_call>"]) is None


def test_strings_in_which_nothing_is_escaped() -> None:
    quote = '<|"|>'
    text = f'{{a:{quote}"}}\\n\n<|" {quote},{quote}b c{quote}:[{quote}{quote}]}}'
    assert mended(text, raw_quote=quote) == '{"a":"\\"}\\\\n\\n<|\\" ","b c":[""]}'


def test_tuples() -> None:
    assert mended("(1, ('a',), [2])", tuples=True) == '[1, ["a"], [2]]'


def test_nesting_has_a_limit() -> None:
    assert mended("[" * 60 + "]" * 60) == "[" * 60 + "]" * 60
    for text in ("[" * 100_000, '{"a":' * 100_000):
        assert read(text, sizes=[len(text)]).failed


TYPED: Schema = {
    "type": "object",
    "properties": {
        "text": STRING,
        "count": INTEGER,
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [STRING, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "lines": {"type": "array", "items": STRING},
        "options": {"$ref": "#/$defs/options"},
        "nested": {"anyOf": [{"$ref": "#/$defs/options"}, {"type": "null"}]},
        "free": {},
    },
    "additionalProperties": INTEGER,
    "$defs": {"options": {"type": "object", "properties": {"name": STRING, "next": {"$ref": "#/$defs/options"}}}},
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        # the declared type wins
        ('{"text": 1.10}', '{"text": "1.10"}'),
        ('{"text": true}', '{"text": "true"}'),
        ('{"text": NaN}', '{"text": "NaN"}'),
        ('{"text": {"a": [1,  "b"]}}', '{"text": "{\\"a\\": [1,  \\"b\\"]}"}'),
        ('{"text": [1]}', '{"text": "[1]"}'),
        ('{"text": 007}', '{"text": "007"}'),
        ('{"text": 2024-01-02}', '{"text": "2024-01-02"}'),
        ('{"text": Oslo}', '{"text": "Oslo"}'),
        ('{"maybe": 5}', '{"maybe": "5"}'),
        ('{"maybe": nan}', '{"maybe": null}'),
        ('{"lines": [1, "a", null]}', '{"lines": ["1", "a", null]}'),
        ('{"count": "5", "ratio": " 5 ", "on": "True"}', '{"count": 5, "ratio": 5, "on": true}'),
        ('{"lines": "[1, \'a\']"}', '{"lines": ["1", "a"]}'),
        ('{"options": "{\\"name\\": 5,  \\"x\\": \\"\\\\u00e9\\"}"}', '{"options": {"name": "5",  "x": "\\u00e9"}}'),
        ('{"nested": {"next": {"next": {"name": 1}}}}', '{"nested": {"next": {"next": {"name": "1"}}}}'),
        ('{"more": "7"}', '{"more": 7}'),
        ('{"count": NaN}', '{"count": null}'),
        # as it is written, where that is allowed or nothing else is meant
        ('{"text": "1.10"}', None),
        ('{"text": null}', None),
        ('{"maybe": null}', None),
        ('{"either": 1, "either": "1"}', None),
        ('{"count": "five", "ratio": "", "on": "yes"}', None),
        ('{"count": 1.5, "ratio": 1}', None),
        ('{"count": {"a": 1}}', None),
        ('{"options": "[1]"}', None),
        ('{"free": "5", "free": 5, "free": {"a": "1"}}', None),
    ],
)
def test_the_declared_type_wins(text: str, right: str | None) -> None:
    assert mended(text, TYPED) == (right or text)


def test_lone_surrogates_stay_escaped() -> None:
    assert mended('{"options": "{\\"name\\": \\"\\ud83d\\"}"}', TYPED) == '{"options": {"name": "\\ud83d"}}'


@given(data=st.data(), value=values, sizes=chunk_sizes, ending=st.sampled_from(["complete", "cut"]))
def test_whatever_comes_is_strict_json_or_none(
    data: st.DataObject, value: Any, sizes: Sequence[int], ending: Ending
) -> None:
    text = data.draw(mutated(json.dumps({"text": value, "nested": {"name": value}, "x": [value]}, ensure_ascii=False)))
    whole = read(text, TYPED, [len(text) or 1], ending)
    again = read(text, TYPED, sizes, ending)
    assert ("".join(again.pieces), again.failed) == ("".join(whole.pieces), whole.failed)
    if not whole.failed:
        strict("".join(whole.pieces))


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments(text: str, tool: Tool = LS) -> str | None:
    def reading(scanner: Scanner) -> Iterator[Any]:
        return read_object(scanner, tool)

    result = read_all(reading, text)
    return None if result.failed else "".join(piece.text for piece in result.pieces)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('\n {"path":  "/srv"}', '{"path":  "/srv"}'),
        ('"{\\"path\\":  \\"/srv\\", \\"depth\\": \\"1\\"}"', '{"path":  "/srv", "depth": 1}'),
        ('""', "{}"),
        ("null", "{}"),
        ("None", "{}"),
        ("[]", None),
        ("5", None),
        ('"text"', None),
        ('"[1]"', None),
        ("", None),
    ],
)
def test_arguments_are_an_object(text: str, right: str | None) -> None:
    assert arguments(text) == right


def test_escaping() -> None:
    assert quoted('a"\\\n\x1f\ud800é') == '"a\\"\\\\\\n\\u001f\\ud800é"'
    assert escape("plain") == "plain"
