from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsing.formats.tagged_values import bare, members, tight


@given(
    st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.text())), st.sampled_from([None, 2])
)
def test_members_are_spelled_as_they_were(arguments: dict[str, Any], indent: int | None) -> None:
    written = list(members(json.dumps(arguments, indent=indent)))
    assert [(name, json.loads(value)) for name, value in written] == list(arguments.items())


def test_members_that_json_would_respell() -> None:
    digits = "9" * 5000
    text = f' {{"a":1.10 ,"a" : [1,  2],"b":{digits}}} '
    assert list(members(text)) == [("a", "1.10"), ("a", "[1,  2]"), ("b", digits)]
    assert list(members("{ }")) == []


@pytest.mark.parametrize(
    ("value", "text", "tight_text"),
    [
        ('"a\\n"', "a\n", "a\n"),
        ('"\\na"', "\na", "\n\na\n"),
        ('""', "", ""),
        ("1.0", "1.0", "1.0"),
        ("[1,2]", "[1,2]", "[1,2]"),
    ],
)
def test_values_between_tags(value: str, text: str, tight_text: str) -> None:
    assert bare(value) == text
    assert tight(value) == tight_text
