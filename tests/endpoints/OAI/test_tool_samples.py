"""Calls as models write them, through the whole server: streamed by the character, streamed at once, and as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.endpoints.OAI.sample_server import (
    BY_THE_CHARACTER,
    Answer,
    SampleServer,
    StreamedAnswer,
    asked,
    asked_in_a_stream,
    cuts,
    serving_samples,
)
from tests.samples import Sample, as_id, each, same_json, sample_files

FILES = sample_files("formats")
LONG = 20  # characters of a string that has to arrive in pieces


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleServer]:
    with serving_samples(FILES, tmp_path_factory.mktemp("samples")) as server:
        yield server


@pytest.mark.parametrize(("name", "sample"), each(FILES), ids=as_id)
def test_an_answer_is_the_same_however_it_comes(samples: SampleServer, name: str, sample: Sample) -> None:
    check_sample(samples, name, sample)


def check_sample(samples: SampleServer, name: str, sample: Sample) -> None:
    samples.load(name)
    whole = asked(samples.server, samples.body(name, sample, BY_THE_CHARACTER))
    check_answer(whole, sample)
    for cut in cuts(sample):
        stream = asked_in_a_stream(samples.server, samples.body(name, sample, cut))
        check_answer(stream.joined(), sample)
        assert [call[:2] for call in stream.joined().calls] == [call[:2] for call in whole.calls]
        if sample.broken != "any":
            assert [call.name for call in stream.calls.values() if not call.complete] == sample.broken
        if cut == BY_THE_CHARACTER:
            check_pieces(stream)


def check_answer(answer: Answer, sample: Sample) -> None:
    assert answer.content == sample.content
    assert answer.reasoning == sample.reasoning
    assert [call.name for call in answer.calls] == [call.name for call in sample.calls]
    for call, expected in zip(answer.calls, sample.calls, strict=True):
        assert same_json(call.arguments, expected.arguments), (call, expected)
        assert call.arguments == expected.arguments or not sample.verbatim
        assert call.id == expected.id or expected.id is None
    assert answer.finish_reason == sample.finish_reason


def check_pieces(stream: StreamedAnswer) -> None:
    """A long string of a call comes while it is generated."""
    for call in stream.calls.values():
        if call.complete:
            strings = [value for value in json.loads(call.arguments).values() if isinstance(value, str)]
            longest = max(map(len, strings), default=0)
            assert longest < LONG or len({number for number, _ in call.pieces}) > longest / 2, call
