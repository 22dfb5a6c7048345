"""Of a path on the server's disk, a text keeps the last name."""

from __future__ import annotations

import pytest

from common.hidden_paths import hide_paths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[Errno 2] No such file: '/home/a b/models/x.safetensors'", "[Errno 2] No such file: 'x.safetensors'"),
        ('in "/srv/models/m/"', 'in "m"'),
        ("in /srv/models/m/config.json: no architecture", "in config.json: no architecture"),
        ("(/srv/models/m, 5)", "(m, 5)"),
        ("below /srv/models/ somewhere", "below a folder somewhere"),
        ("/usr/lib/python3/site-packages/torch/nn.py:12 fails", "nn.py:12 fails"),
        (r"C:\Users\me\models\m\config.json is empty", "config.json is empty"),
        (r"'D:\my models\m'", "'m'"),
    ],
)
def test_the_place_of_a_file_is_cut(text: str, shown: str) -> None:
    assert hide_paths(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Load one with POST /v1/model/load.",
        "https://huggingface.co/author/model/resolve/main",
        "7 tokens/s and/or 3/4",
        "models/m/config.json and ../x/y",
        "author/model",
        "",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert hide_paths(text) == text
