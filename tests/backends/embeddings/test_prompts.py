"""What a request says of its texts -> the prompt of the model."""

from __future__ import annotations

import pytest

from backends.embeddings.messages import EmbedOptions
from backends.embeddings.prompts import Purpose, find_purpose
from common.errors import InvalidRequest

E5 = {"query": "query: ", "passage": "passage: "}
NOMIC = {"search_query": "search_query: ", "search_document": "search_document: ", "clustering": "clustering: "}


@pytest.mark.parametrize(
    ("prompts", "input_type", "purpose"),
    [
        (E5, "query", Purpose("query: ", "query")),
        (E5, "document", Purpose("passage: ", "document")),
        (E5, "search_document", Purpose("passage: ", "document")),
        (NOMIC, "query", Purpose("search_query: ", "query")),
        (NOMIC, "clustering", Purpose("clustering: ", None)),
        ({}, "query", Purpose("", "query")),
        ({}, "passage", Purpose("", "document")),
        (E5, None, Purpose("", None)),
    ],
)
def test_an_input_type_finds_the_prompt_by_all_of_its_names(
    prompts: dict[str, str], input_type: str | None, purpose: Purpose
) -> None:
    assert find_purpose(prompts, None, EmbedOptions(input_type=input_type)) == purpose


def test_where_nothing_is_said_the_model_s_default_counts() -> None:
    assert find_purpose(E5, "passage", EmbedOptions()) == Purpose("passage: ", None)
    assert find_purpose(E5, "passage", EmbedOptions(input_type="query")) == Purpose("query: ", "query")


def test_a_prompt_name_is_taken_exactly() -> None:
    assert find_purpose(E5, None, EmbedOptions(prompt_name="passage")) == Purpose("passage: ", "document")
    with pytest.raises(InvalidRequest, match="prompt_name 'document' is none of the model's.*query, passage") as raised:
        find_purpose(E5, None, EmbedOptions(prompt_name="document"))
    assert raised.value.param == "prompt_name"


def test_an_unknown_input_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input_type 'image' is none .* it has: none") as raised:
        find_purpose({}, None, EmbedOptions(input_type="image"))
    assert raised.value.param == "input_type"
