from __future__ import annotations

import pytest

from common.errors import ContextLengthExceeded, InvalidRequest, ServerError
from endpoints.paths import Paths


@pytest.fixture
def paths() -> Paths:
    paths = Paths()
    paths.add("max_tokens", "options.num_predict")
    paths.add("messages.1.content.0", "images.0")
    return paths


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("max_tokens", "options.num_predict"),
        ("messages.1.content.0.image_url", "images.0.image_url"),
        ("messages.1.content.10", "messages.1.content.10"),
        ("messages.1", "messages.1"),
    ],
)
def test_where_a_field_comes_from(paths: Paths, path: str, origin: str) -> None:
    assert paths.origin(path) == origin


def test_errors_name_what_was_sent(paths: Paths) -> None:
    with pytest.raises(ContextLengthExceeded) as told, paths.as_sent():
        raise ContextLengthExceeded("max_tokens is too much.", param="max_tokens")
    assert (told.value.message, told.value.param) == ("options.num_predict is too much.", "options.num_predict")


@pytest.mark.parametrize(
    "error", [InvalidRequest("No.", param="seed"), InvalidRequest("No."), ServerError("No.", param="max_tokens")]
)
def test_other_errors_stay_as_they_are(paths: Paths, error: ServerError) -> None:
    with pytest.raises(ServerError) as told, paths.as_sent():
        raise error
    assert told.value is error
