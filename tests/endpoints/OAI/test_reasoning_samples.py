"""Thoughts as models write them, and formats that are found by the template, through the whole server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.parsing.formats.base import Call
from common.parsing.formats.registry import FORMATS
from tests.endpoints.OAI.sample_server import SampleServer, serving_samples
from tests.endpoints.OAI.test_chat import chat
from tests.endpoints.OAI.test_tool_samples import check_sample
from tests.samples import ExpectedCall, Sample, SampleFile, as_id, each, sample_files

WHATEVER = SampleFile(
    samples=[
        Sample(
            name=format.names[0],
            text=format.write([Call("ls", '{"path": "/srv"}')]),
            calls=[ExpectedCall("ls", '{"path": "/srv"}')],
        )
        for format in FORMATS
        if format.trigger
    ]
)
# Nothing points to the form of calls: those that begin with something of their own are tried.
FILES = sample_files("thoughts") | sample_files("detection") | {"whatever": WHATEVER}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleServer]:
    with serving_samples(FILES, tmp_path_factory.mktemp("samples")) as server:
        yield server


@pytest.mark.parametrize(("name", "sample"), each(FILES), ids=as_id)
def test_an_answer_is_the_same_however_it_comes(samples: SampleServer, name: str, sample: Sample) -> None:
    check_sample(samples, name, sample)


def test_every_token_of_the_answer_has_its_log_probability(samples: SampleServer) -> None:
    """Tags and thoughts have none."""
    name, wanted = "own", "a thought and an answer"
    samples.load(name)
    (sample,) = (sample for sample in FILES[name].samples if sample.name == wanted)
    body = samples.body(name, sample, "whole") | {"logprobs": True, "top_logprobs": 3}
    (choice,) = chat(samples.server, body)["choices"]
    assert choice["message"]["content"] == sample.content
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == sample.content
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
