"""What `/metrics` shows, as Prometheus reads it."""

from __future__ import annotations

import http.client
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx
import pytest
from prometheus_client import Metric, parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from common.errors import ErrorRecord
from common.metrics import Metrics
from endpoints import metrics as route
from tests.endpoints.running import ADMIN_KEY, API_KEY, RunningServer, alpha_server, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script

Series: TypeAlias = tuple[str, frozenset[tuple[str, str]]]
Values: TypeAlias = dict[Series, float]
Since: TypeAlias = Callable[[], "Changes"]

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "ls"}}]
PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"], cached_tokens=4, draft_tokens=(7, 2)),
    Play(when="CALL", chunks=[CALL]),
    Play(when="THINK", chunks=["<think>", "why", "</think>", "so"]),
    Play(when="HANG", hang_after=0),
    Play(when="STALL", chunks=["a ", "b "], hang_after=2),
    Play(when="PREFILL", prefill=[(300, 1000)], cached_tokens=100, hang_after=0),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="CRASH", chunks=["half", "way"], crash_after=1),
    Play(when="BUSY", busy=1.0),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with alpha_server(tmp_path_factory.mktemp("server"), PLAYS) as running:
        yield running


@pytest.fixture
def fresh(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server without a model, of which "beta" cannot be loaded."""
    refused = ErrorRecord(code="model_load_failed", message="out of memory")
    scripted.write(Script(plays=PLAYS, models={"beta": ModelScript(load_error=refused)}))
    with running_server(scripted).running() as running:
        yield running


def scrape(server: RunningServer) -> Values:
    response = server.http.get("/metrics")
    assert response.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def series(metric: str, /, **labels: str) -> Series:
    return f"waypoint_{metric}", frozenset(labels.items())


class Changes:
    """What has changed in the metrics since an earlier scrape."""

    def __init__(self, before: Values, after: Values) -> None:
        self._before = before
        self._after = after

    def of(self, metric: str, /, **labels: str) -> float:
        key = series(metric, **labels)
        return self._after.get(key, 0) - self._before.get(key, 0)

    def by(self, metric: str, label: str) -> dict[str, float]:
        """The changes of a metric by one of its labels, the unchanged left out."""
        changes: defaultdict[str, float] = defaultdict(float)
        for name, labels in self._after:
            if name == f"waypoint_{metric}":
                changes[dict(labels)[label]] += self.of(metric, **dict(labels))
        return {value: change for value, change in changes.items() if change}


@pytest.fixture
def since(server: RunningServer) -> Since:
    """Compares a new scrape with one before the test."""
    before = scrape(server)
    return lambda: Changes(before, scrape(server))


def chat(text: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def ask(server: RunningServer, path: str = CHAT, status: int = 200, **body: object) -> httpx.Response:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response


@contextmanager
def asked_elsewhere(server: RunningServer, text: str) -> Iterator[None]:
    """Inside the block, a request waits for its answer."""
    asked = len(server.engine.history())
    thread = threading.Thread(target=lambda: server.http.post(CHAT, json=chat(text)))
    thread.start()
    eventually(lambda: len(server.engine.history()) > asked)
    yield
    thread.join(30)


# --- the format and who may read it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0", "text/plain; version=1.0.0"),
        ("text/plain;version=new", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.x", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
            "application/openmetrics-text; version=1.0.0",
        ),
    ],
)
def test_the_format_is_the_one_asked_for(server: RunningServer, accept: str, content_type: str) -> None:
    response = server.http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith(f"{content_type}; charset=utf-8")
    parse: Callable[[str], Iterable[Metric]] = parser.text_string_to_metric_families
    if content_type.startswith("application"):
        parse = openmetrics_parser.text_string_to_metric_families
    names = {family.name for family in parse(response.text)}
    listed = {family.name.removesuffix("_total") for family in Metrics().families}
    # Nothing was counted yet of what is labelled with endpoints or routes.
    assert listed - names <= {"waypoint_requests", "waypoint_answers", "waypoint_http_errors"}
    assert names <= listed


def test_metrics_need_a_key(server: RunningServer) -> None:
    assert server.anonymous.get("/metrics").status_code == 401
    assert server.anonymous.get("/metrics", headers={"x-api-key": "wrong"}).status_code == 401
    assert server.anonymous.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


def test_public_metrics_need_none(scripted: ScriptedEngine) -> None:
    scripted.write(Script())
    with running_server(scripted, network={"public_metrics": True}).running() as server:
        assert "waypoint_build_info" in server.anonymous.get("/metrics").text
        assert server.anonymous.get("/metrics", headers={"x-api-key": "wrong"}).status_code == 200
        assert server.anonymous.get("/v1/models").status_code == 401


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_answers_and_their_tokens(server: RunningServer, since: Since, stream: bool, n: int) -> None:
    answer = ask(server, **chat("COUNT", n=n, stream=stream))
    prompt_tokens = len(server.engine.history()[-1].prompt)
    assert answer.text.count("three") == n
    changes = since()
    assert changes.of("requests_total", endpoint="/chat/completions") == 1
    assert changes.of("answers_total", endpoint="/chat/completions", outcome="stop") == n
    assert changes.by("answers_total", "outcome") == {"stop": n}
    assert changes.by("prompt_tokens_total", "source") == {"vram": 4 * n, "new": (prompt_tokens - 4) * n}
    assert changes.of("generation_tokens_total") == len("one two three") * n
    assert changes.by("draft_tokens_total", "outcome") == {"accepted": 7 * n, "rejected": 2 * n}
    for histogram in ("queue_time", "prefill_time", "time_to_first_token", "answer_time"):
        assert changes.of(f"{histogram}_seconds_count") == n
        assert changes.of(f"{histogram}_seconds_bucket", le="+Inf") == n
    assert changes.of("inter_token_latency_seconds_count") == len("two three") * n  # the tokens after the first event
    assert changes.of("answers_waiting") == changes.of("answers_running") == 0


@pytest.mark.parametrize(
    ("path", "body", "endpoint", "outcomes"),
    [
        (CHAT, chat("COUNT", max_tokens=5), "/chat/completions", {"length": 1}),
        ("/chat/completions", chat("COUNT"), "/chat/completions", {"stop": 1}),
        ("/v1/completions", {"prompt": ["COUNT", "hi"]}, "/completions", {"stop": 2}),
        ("/completion", {"prompt": "COUNT", "n_predict": 3}, "/completion", {"length": 1}),
        ("/completion", {"prompt": "COUNT", "stream": True}, "/completion", {"stop": 1}),
    ],
)
def test_endpoints_and_finish_reasons(
    server: RunningServer, since: Since, path: str, body: Any, endpoint: str, outcomes: dict[str, int]
) -> None:
    ask(server, path, **body)
    changes = since()
    assert changes.by("answers_total", "endpoint") == {endpoint: sum(outcomes.values())}
    assert changes.by("answers_total", "outcome") == outcomes
    assert changes.by("requests_total", "endpoint") == {endpoint: 1}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_an_outcome(server: RunningServer, since: Since, stream: bool) -> None:
    ask(server, **chat("CALL", tools=TOOLS, stream=stream))
    changes = since()
    assert changes.by("answers_total", "outcome") == {"tool_calls": 1}


def test_thoughts_are_counted(server: RunningServer, since: Since) -> None:
    usage = ask(server, **chat("THINK")).json()["usage"]
    changes = since()
    assert changes.of("reasoning_tokens_total") == usage["completion_tokens_details"]["reasoning_tokens"]
    assert changes.of("generation_tokens_total") == usage["completion_tokens"]


# --- answers that do not finish -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("text", "tokens"), [("HANG", 0), ("STALL", 4)])
def test_a_stream_whose_client_goes(server: RunningServer, since: Since, text: str, tokens: int, n: int) -> None:
    with server.http.stream("POST", CHAT, json=chat(text, stream=True, n=n)):
        eventually(lambda: since().of("generation_tokens_total") == tokens * n)
        waiting = 0 if tokens else n
        changes = since()
        assert (changes.of("answers_waiting"), changes.of("answers_running")) == (waiting, n - waiting)
        assert changes.by("answers_total", "outcome") == {}
    eventually(lambda: since().by("answers_total", "outcome") == {"cancelled": n})
    changes = since()
    assert changes.of("answers_waiting") == changes.of("answers_running") == 0
    assert changes.of("answer_time_seconds_count") == 0
    assert changes.by("prompt_tokens_total", "source") == {}


def test_a_whole_answer_whose_client_goes(server: RunningServer, since: Since, log_lines: list[str]) -> None:
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"))
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    connection.request("POST", CHAT, json.dumps(chat("PREFILL")), headers)
    eventually(lambda: since().of("answers_running") == 1)
    connection.close()
    eventually(lambda: since().by("answers_total", "outcome") == {"cancelled": 1})
    changes = since()
    assert changes.of("unfinished_prompt_tokens_total") == 200
    assert changes.by("http_errors_total", "code") == {}
    [line] = [line for line in log_lines if line.startswith("Ended after")]
    assert line.endswith("resumed 100, prefilled to 300; generated 0 tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails(server: RunningServer, since: Since, stream: bool) -> None:
    ask(server, status=200 if stream else 500, **chat("FAIL", stream=stream))
    changes = since()
    assert changes.by("answers_total", "outcome") == {"engine_failed": 1}
    assert changes.by("http_errors_total", "code") == ({} if stream else {"engine_failed": 1})
    assert changes.of("generation_tokens_total") == len("half")


def test_a_prompt_that_is_refused(server: RunningServer, since: Since, log_lines: list[str]) -> None:
    ask(server, status=400, **chat("x" * 5000, n=2))
    changes = since()
    assert changes.by("answers_total", "outcome") == {"context_length_exceeded": 2}
    assert changes.of("http_errors_total", route="/chat/completions", code="context_length_exceeded") == 1
    assert changes.of("answers_waiting") == 0
    assert changes.of("unfinished_prompt_tokens_total") == 0
    assert not any(line.startswith("Ended after") for line in log_lines)


def test_errors_of_every_kind_of_route(server: RunningServer, since: Since) -> None:
    ask(server, status=400, messages=[])
    server.anonymous.get("/v1/models")
    server.http.post("/v1/model/load", json={})
    server.http.get("/v1/models/none")
    server.http.get("/models/nothing/either")
    server.http.get("/nowhere")
    server.http.put("/nowhere/else")
    server.http.delete("/v1/models")
    changes = since()
    assert changes.of("http_errors_total", route="/chat/completions", code="invalid_request") == 1
    assert changes.of("http_errors_total", route="/models", code="invalid_api_key") == 1
    assert changes.of("http_errors_total", route="/model/load", code="invalid_api_key") == 1
    assert changes.of("http_errors_total", route="/models/{model_id:path}", code="model_not_found") == 2
    assert changes.of("http_errors_total", route="", code="not_found") == 2
    assert changes.of("http_errors_total", route="", code="method_not_allowed") == 1
    assert changes.by("requests_total", "endpoint") == {}


def test_metrics_do_not_grow_with_requests(server: RunningServer) -> None:
    def use(number: int) -> set[Series]:
        ask(server, **chat(f"hi {number}", model=f"model-{number}", user=f"user-{number}"))
        server.http.get(f"/v1/models/none-{number}")
        server.http.get(f"/nowhere-{number}")
        server.http.get("/v1/models", headers={"x-api-key": f"key-{number}"})
        return set(scrape(server))

    first = use(0)
    assert [use(number) for number in range(1, 4)] == [first] * 3


# --- models and the engine ----------------------------------------------------------------------------------------


def test_from_the_first_load_to_the_unload(fresh: RunningServer) -> None:
    of_engine = ("waypoint_cache_", "waypoint_checkpoint", "waypoint_model_info")
    before = scrape(fresh)
    assert before[series("model_loads_total", outcome="loaded")] == 0
    assert not any(name.startswith(of_engine) for name, _ in before)
    fresh.load("alpha")
    loaded = scrape(fresh)
    assert loaded[series("model_loads_total", outcome="loaded")] == 1
    assert loaded[series("model_info", name="alpha", architecture="Scripted", device="cpu")] == 1
    assert loaded[series("cache_used_tokens", tier="ram")] == 256
    assert loaded[series("checkpoints", tier="ram", usable="true", boundary="true")] == 1
    with asked_elsewhere(fresh, "STALL"):
        assert fresh.admin.post("/v1/model/unload").status_code == 200
    unloaded = scrape(fresh)
    assert unloaded[series("answers_total", endpoint="/chat/completions", outcome="request_cancelled")] == 1
    assert unloaded[series("answers_running")] == 0
    counters = {name for name, _ in unloaded if name.startswith(of_engine)}
    assert all(name.endswith("_total") for name in counters)
    assert unloaded[series("cache_hit_tokens_total", tier="vram")] == 1024


def test_a_load_that_fails_and_the_model_that_is_loaded_again(fresh: RunningServer) -> None:
    fresh.load("alpha")
    scrape(fresh)
    fresh.load("alpha")  # it is loaded already
    failed = fresh.admin.post("/v1/model/load", json={"model_name": "beta"})
    assert "The previous model alpha is loaded again" in failed.text
    values = scrape(fresh)
    assert values[series("model_loads_total", outcome="loaded")] == 1
    assert values[series("model_loads_total", outcome="failed")] == 1
    assert values[series("engine_restarts_total", outcome="back")] == 0
    assert values[series("cache_hit_tokens_total", tier="vram")] == 2 * 1024  # each process has told 1024


def test_a_crash_is_counted_and_counters_go_on(fresh: RunningServer) -> None:
    fresh.load("alpha")
    assert scrape(fresh)[series("checkpoint_evictions_total", usable="true")] == 1
    ask(fresh, status=500, **chat("CRASH"))
    ask(fresh, **chat("COUNT"))  # waits for the engine
    values = scrape(fresh)
    assert values[series("engine_restarts_total", outcome="back")] == 1
    assert values[series("engine_restarts_total", outcome="failed")] == 0
    assert values[series("model_loads_total", outcome="loaded")] == 1
    assert values[series("answers_total", endpoint="/chat/completions", outcome="engine_failed")] == 1
    assert values[series("answers_total", endpoint="/chat/completions", outcome="stop")] == 1
    assert values[series("checkpoint_evictions_total", usable="true")] == 2
    assert values[series("checkpoints_pruned_total")] == 2
    assert values[series("checkpoints_capacity")] == 4


def test_a_busy_engine_does_not_hold_up_a_scrape(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "PATIENCE", 0.05)
    scrape(server)
    with asked_elsewhere(server, "BUSY"):
        values = [scrape(server) for _ in range(3)]
        assert server.requests_in_engine == 1, "the scrapes have waited for the engine"
        assert server.call(questions(server)) == 1, "a question for each scrape"
    for value in values:
        assert value[series("cache_used_tokens", tier="vram")] == 512
    ages = [value[series("cache_state_age_seconds")] for value in values]
    assert ages == sorted(set(ages))
    eventually(lambda: scrape(server)[series("cache_state_age_seconds")] < ages[0])


async def questions(server: RunningServer) -> int:
    return len(server.manager.require()._calls)
