"""What is measured of an answer, by a clock that the test sets, and the line that the log gets."""

from __future__ import annotations

import pytest

from common.generation import Echo, Event, Finish, Prefill, TextDelta, Usage
from common.metrics import Metrics
from endpoints import answer_record
from endpoints.answer_record import CANCELLED, AnswerRecord

USAGE = Usage(
    prompt_tokens=1000,
    completion_tokens=4,
    cached_tokens=512,
    matched_tokens=768,
    ram_tokens=256,
    queue_seconds=0.01,
    prompt_seconds=1.5,
    completion_seconds=2.25,
)


class Measured:
    """One answer, and the metrics of a server that gives no other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(answer_record, "monotonic", lambda: self.now)
        self._metrics = Metrics()
        self.record = AnswerRecord(self._metrics, "/completions")

    def at(self, seconds: float, event: Event) -> None:
        """An event so long after the request."""
        self.now = 100.0 + seconds
        self.record.received(event)

    def value(self, metric: str, /, **labels: str) -> float | None:
        return self._metrics.registry.get_sample_value(f"waypoint_{metric}", labels)

    def outcome(self, outcome: str) -> float | None:
        return self.value("answers_total", endpoint="/completions", outcome=outcome)

    def times(self, metric: str) -> tuple[float | None, float | None]:
        """How many there are, and their sum."""
        return self.value(f"{metric}_seconds_count"), self.value(f"{metric}_seconds_sum")

    def in_flight(self) -> tuple[float | None, float | None]:
        """Answers waiting and running."""
        return self.value("answers_waiting"), self.value("answers_running")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def finish(usage: Usage = USAGE) -> Finish:
    return Finish(reason="stop", eos_reason="stop_token", usage=usage)


def test_the_phases_of_an_answer(measured: Measured) -> None:
    assert measured.in_flight() == (1, 0)
    measured.record.accepted(1000)
    measured.at(2, Prefill(done_tokens=512, total_tokens=1000, cached_tokens=512))
    assert measured.in_flight() == (0, 1)
    measured.at(5, Prefill(done_tokens=1000, total_tokens=1000, cached_tokens=512))
    measured.at(6, TextDelta("a", [1]))
    measured.at(6.5, TextDelta("b", [2]))
    measured.at(8, finish(Usage(prompt_tokens=1000, completion_tokens=2, queue_seconds=0.25, prompt_seconds=3.5)))
    assert measured.in_flight() == (0, 0)
    measured.record.end("stop")
    assert measured.times("queue_time") == (1, 0.25)
    assert measured.times("prefill_time") == (1, 3.5)
    assert measured.times("time_to_first_token") == (1, 6)
    assert measured.times("inter_token_latency") == (1, 0.5)
    assert measured.times("answer_time") == (1, 8)
    assert measured.outcome("stop") == 1
    assert measured.value("unfinished_prompt_tokens_total") == 0


def test_tokens_that_come_together_share_the_time(measured: Measured) -> None:
    measured.at(1, TextDelta("ab", [1, 2]))
    measured.at(1.75, TextDelta("cde", [3, 4, 5]))
    assert measured.times("time_to_first_token") == (1, 1)
    assert measured.times("inter_token_latency") == (3, 0.75)
    assert measured.value("inter_token_latency_seconds_bucket", le="0.2") == 0
    assert measured.value("inter_token_latency_seconds_bucket", le="0.3") == 3
    assert measured.value("generation_tokens_total") == 5


def test_text_without_tokens_is_no_token(measured: Measured) -> None:
    measured.at(1, Echo("prompt", [1, 2, 3]))
    measured.at(2, TextDelta("held back"))
    assert measured.in_flight() == (0, 1)
    assert measured.times("time_to_first_token") == (0, 0)
    measured.at(3, TextDelta("a", [1]))
    assert measured.times("time_to_first_token") == (1, 3)


def test_tokens_that_end_an_answer_count(measured: Measured) -> None:
    measured.at(1, TextDelta("abc", [1, 2, 3]))
    measured.at(2, finish())
    assert measured.value("generation_tokens_total") == 4


def test_only_the_first_end_counts(measured: Measured) -> None:
    measured.at(1, finish())
    for outcome in ("tool_calls", CANCELLED):
        measured.record.end(outcome)
    assert measured.outcome("tool_calls") == 1
    assert measured.outcome(CANCELLED) is None


def test_what_comes_after_the_end_is_not_measured(measured: Measured) -> None:
    measured.record.end(CANCELLED)
    assert measured.in_flight() == (0, 0)
    measured.at(1, TextDelta("late", [1]))
    measured.at(2, finish())
    assert measured.in_flight() == (0, 0)
    assert measured.value("generation_tokens_total") == 0
    assert measured.times("answer_time") == (0, 0)


@pytest.mark.parametrize(
    ("events", "processed"),
    [
        ([], 0),
        ([Prefill(done_tokens=512, total_tokens=1000, cached_tokens=512)], 0),
        ([Prefill(done_tokens=768, total_tokens=1000, cached_tokens=512)], 256),
        ([Prefill(done_tokens=768, total_tokens=1000, cached_tokens=512), TextDelta("a", [1])], 488),
        ([TextDelta("a", [1])], 1000),
    ],
)
def test_prompt_tokens_of_an_answer_that_does_not_finish(
    measured: Measured, events: list[Event], processed: int
) -> None:
    measured.record.accepted(1000)
    for event in events:
        measured.at(1, event)
    measured.record.end("engine_failed")
    assert measured.value("unfinished_prompt_tokens_total") == processed
    assert measured.outcome("engine_failed") == 1
    assert measured.in_flight() == (0, 0)


# --- the log ------------------------------------------------------------------------------------------------------


def test_a_finished_answer_is_one_line(measured: Measured, log_lines: list[str]) -> None:
    measured.record.accepted(1000)
    measured.at(1, TextDelta("abcd", [1, 2, 3, 4]))
    measured.at(2, finish())
    measured.record.end("stop")
    assert log_lines == [
        "Generated 4 tokens in 2.25 s (stop_token); prompt 1000 tokens: matched 768, resumed 512 (256 from RAM, 0 from "
        "disk), replayed 256, processed 488 in 1.50 s after 0.01 s in the queue"
    ]


def test_an_answer_that_does_not_finish_is_one_line(measured: Measured, log_lines: list[str]) -> None:
    measured.record.accepted(1000)
    measured.at(1, Prefill(done_tokens=768, total_tokens=1000, cached_tokens=512))
    measured.now += 1.5
    measured.record.end(CANCELLED)
    assert log_lines == [
        "Ended after 2.50 s (cancelled); prompt 1000 tokens: resumed 512, prefilled to 768; generated 0 tokens"
    ]


def test_an_answer_that_has_begun_says_how_far_it_came(measured: Measured, log_lines: list[str]) -> None:
    measured.record.accepted(1000)
    measured.at(1, TextDelta("ab", [1, 2]))
    measured.record.end("engine_failed")
    assert log_lines == [
        "Ended after 1.00 s (engine_failed); prompt 1000 tokens: resumed 0, prefilled to 1000; generated 2 tokens"
    ]


def test_a_prompt_that_was_refused_has_no_line(measured: Measured, log_lines: list[str]) -> None:
    measured.record.end("context_length_exceeded")
    assert log_lines == []
    assert measured.outcome("context_length_exceeded") == 1
