"""What the server says about its prompt cache, on the scripted engine and then on the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from backends.client import EngineClient
from common.caching import EVERYBODY, CacheExplanation
from common.generation import GenerationRequest
from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script

CHAT, TEXT, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/explain"
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "GREET"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "COUNT"},
]
PLAYS = [
    Play(when="COUNT", chunks=["one"], cached_tokens=4),
    Play(when="GREET", chunks=["Hi. "]),
    Play(when="DIE", crash_after=0),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With "alpha" loaded, which has recurrent layers; "beta", beside it, has none."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    engine.add_model("alpha")
    engine.add_model("beta")
    engine.write(Script(plays=PLAYS, models={"beta": ModelScript(recurrent=False)}))
    with running_server(engine).running() as running:
        running.load("alpha")
        yield running


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a model without recurrent layers and a disk tier, and without keys."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("dense"))
    engine.add_model("beta")
    engine.write(Script(plays=PLAYS, models={"beta": ModelScript(recurrent=False)}))
    disk_tier = {"disk_cache_dir": str(engine.root / "disk")}
    with running_server(engine, auth=False, memory=disk_tier).running() as running:
        running.load("beta")
        yield running


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --- what is cached ---------------------------------------------------------------------------------------------------


def test_an_api_key_sees_totals(server: RunningServer) -> None:
    report = ok(server.http.get("/v1/cache"))
    assert report["model"] == "alpha"
    vram, ram = report["tiers"]
    assert (vram["tier"], ram["tier"]) == ("vram", "ram")
    assert (vram["used_tokens"], vram["active_tokens"]) == (512, 256)
    assert (vram["hit_tokens"], vram["evicted_tokens"]) == (1024, 256)
    checkpoints = report["checkpoints"]
    assert (checkpoints["capacity"], checkpoints["held"], checkpoints["usable"]) == (4, 2, 1)
    assert (checkpoints["hits"], checkpoints["evictions"], checkpoints["evictions_usable"]) == (3, 2, 1)
    assert checkpoints["entries"] is None
    assert (report["active_requests"], report["queued_requests"]) == (1, 0)


def test_an_administrator_sees_every_checkpoint(server: RunningServer) -> None:
    report = ok(server.admin.get("/v1/cache"))
    last, anchor = report["checkpoints"].pop("entries")
    assert anchor == {
        "position": 256, "bytes": 1000, "age_seconds": 60.0, "tier": "ram", "usable": True, "boundary": True,
    }  # fmt: skip
    assert (last["position"], last["usable"], last["boundary"]) == (512, False, False)
    totals = ok(server.http.get("/v1/cache"))
    assert totals["checkpoints"].pop("entries") is None
    assert totals == report


def test_a_model_without_recurrent_layers_has_no_checkpoints(dense: RunningServer) -> None:
    assert ok(dense.anonymous.get("/cache"))["checkpoints"] is None


def test_clear_says_what_it_dropped(server: RunningServer) -> None:
    assert ok(server.admin.post("/v1/cache/clear")) == {"pages": 3, "checkpoints": 2}


def test_flush_says_what_it_wrote(dense: RunningServer) -> None:
    assert ok(dense.anonymous.post("/cache/flush")) == {"pages": 2, "checkpoints": 1}


def test_flush_needs_a_disk_tier(server: RunningServer) -> None:
    assert "Set memory.disk_cache_dir" in refused(server.admin.post("/v1/cache/flush"))["message"]


ROUTES = [
    ("GET", "/v1/cache", None),
    ("POST", "/v1/cache/flush", None),
    ("POST", "/v1/cache/clear", None),
    ("POST", EXPLAIN, {"prompt": "x"}),
    ("GET", "/v1/cache/plan?prompt_tokens=10", None),
]


def test_without_a_model(empty_server: RunningServer) -> None:
    for method, path, body in ROUTES:
        error = refused(empty_server.admin.request(method, path, json=body), 503)
        assert (error["code"], "No model is loaded" in error["message"]) == ("model_not_loaded", True), path
    # Of a model with a name no more is asked than that it can be loaded.
    answer = ok(empty_server.admin.get("/v1/cache/plan?prompt_tokens=4000&model=alpha"))
    assert (answer["model"], answer["marks"]) == ("alpha", [2048, 3840])
    refused(empty_server.http.get("/v1/model"), 503)


def test_while_the_engine_is_started_again(empty_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.process_client.RESTART_DELAYS", (3600.0,))
    empty_server.engine.write(Script(plays=PLAYS))
    empty_server.load("alpha")
    assert empty_server.http.post("/v1/completions", json={"prompt": "DIE"}).status_code == 500
    *ask_the_engine, plan = ROUTES
    for method, path, body in ask_the_engine:
        response = empty_server.admin.request(method, path, json=body)
        assert "The engine of alpha is restarting" in refused(response, 503)["message"]
        assert response.headers["Retry-After"]
    assert ok(empty_server.http.request(plan[0], plan[1]))["model"] == "alpha"


# --- what a prompt finds ----------------------------------------------------------------------------------------------


def test_a_prompt_is_explained(server: RunningServer) -> None:
    explanation = ok(server.http.post(EXPLAIN, json={"prompt": "COUNT me"}))
    assert explanation.pop("reason").startswith("The script says so")
    assert explanation == {
        "prompt_tokens": 8,
        "matched_tokens": 4,
        "resumed_tokens": 4,
        "processed_tokens": 4,
        "replayed_tokens": 0,
        "ram_tokens": 0,
        "disk_tokens": 0,
        "difference": None,
    }


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """The requests that engines are asked to explain."""
    requests: list[GenerationRequest] = []
    explain = EngineClient.explain

    async def spy(client: EngineClient, request: GenerationRequest) -> CacheExplanation:
        requests.append(request)
        return await explain(client, request)

    monkeypatch.setattr(EngineClient, "explain", spy)
    return requests


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        (CHAT, {"messages": TURNS}, 1),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "tool_choice": "auto", "n": 2, "seed": 3}, 1),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "tool_choice": "required", "temperature": 0.5}, 1),
        (CHAT, {"messages": TURNS[:3], "continue_final_message": True, "max_tokens": 3}, 1),
        (CHAT, {"messages": TURNS, "response_prefix": "Yes", "enable_thinking": False, "stream": True}, 1),
        (CHAT, {"messages": TURNS, "response_format": {"type": "json_object"}, "stop": ["x"], "logprobs": True}, 1),
        (CHAT, {"messages": TURNS, "prompt": "of no interest here"}, 1),
        (TEXT, {"prompt": "COUNT", "messages": None}, 1),
        (TEXT, {"prompt": ["one", "two", "three"], "n": 1, "best_of": 2, "max_tokens": 5}, 3),
        (TEXT, {"prompt": ["one", "two"], "n": 3, "seed": 1, "cache_boundaries": [2]}, 2),
        (TEXT, {"prompt": [72, 105]}, 1),
        (TEXT, {"prompt": [[72, 105], [72]]}, 2),
        (TEXT, {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 1, "add_bos_token": False}, 1),
    ],
)
def test_what_is_explained_is_what_would_be_generated(
    server: RunningServer, explained: list[GenerationRequest], path: str, body: dict[str, Any], prompts: int
) -> None:
    before = len(server.engine.history())
    first = ok(server.http.post(EXPLAIN, json=body))
    assert len(server.engine.history()) == before  # asked, not generated
    assert server.http.post(path, json=body).is_success
    again = ok(server.http.post(EXPLAIN, json=body))

    generated = server.engine.history()[before:]
    one_a_prompt = generated[:: len(generated) // prompts]
    assert explained == [*one_a_prompt, *one_a_prompt]
    assert first == again
    assert len(first if isinstance(first, list) else [first]) == prompts


def test_presets_are_in_what_is_explained(server: RunningServer, explained: list[GenerationRequest]) -> None:
    overrides = {"add_bos_token": {"override": False, "force": True}}
    ok(server.admin.post("/v1/sampling/override/switch", json={"overrides": overrides}))
    ok(server.http.post(EXPLAIN, json={"prompt": "x", "add_bos_token": True}))
    ok(server.admin.post("/v1/sampling/override/unload"))
    assert [request.add_bos for request in explained] == [False]


def test_the_turn_before_is_known_and_asking_is_no_turn(
    server: RunningServer, explained: list[GenerationRequest]
) -> None:
    first, second = {"messages": TURNS[:2]}, {"messages": TURNS}  # in which the client has trimmed the answer
    ok(server.http.post(EXPLAIN, json=second))
    assert ok(server.http.post(CHAT, json=first))["choices"][0]["message"]["content"] == "Hi. "
    for body in (first, second, second):
        ok(server.http.post(EXPLAIN, json=body))
    ok(server.http.post(CHAT, json=second))
    before, opening, *known = [str(request.prompt) for request in explained]
    generated = str(server.engine.history()[-1].prompt)
    assert known == [generated, generated]
    assert generated.startswith(opening + "Hi. <|im_end|>")
    assert before.startswith(opening + "Hi.<|im_end|>")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": 7}]}]}),
        (CHAT, {"messages": TURNS, "temperature": 99}),
        (CHAT, {"messages": TURNS, "tool_choice": "sometimes"}),
        (CHAT, {"messages": TURNS, "top_logprobs": 3}),
        (CHAT, {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": True}),
        (CHAT, {"messages": TURNS, "regex_pattern": "("}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}),
        (TEXT, {"prompt": {"a": 1}}),
        (TEXT, {"prompt": [10**30]}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": "x", "n": 0}),
        (TEXT, {"prompt": "x", "cache_boundaries": [-1]}),
        (TEXT, {"prompt": "x", "best_of": 1, "n": 2}),
        (TEXT, {"prompt": [1], "suffix": "y"}),
        (TEXT, {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
        (TEXT, {"prompt": "x" * 5000}),
        (TEXT, {"prompt": ["x", "x" * 5000]}),
    ],
)
def test_what_cannot_be_generated_cannot_be_explained(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    error = refused(server.http.post(EXPLAIN, json=body))
    assert error == refused(server.http.post(path, json=body))


@pytest.mark.parametrize("body", [{}, {"messages": None, "prompt": None}, {"model": "alpha"}])
def test_nothing_to_explain(server: RunningServer, body: dict[str, Any]) -> None:
    error = refused(server.http.post(EXPLAIN, json=body))
    assert (error["param"], "or a prompt" in error["message"]) == ("messages", True)


@pytest.mark.parametrize("content", [b"[1]", b"null", b'"text"', b""])
def test_a_body_that_is_no_object(server: RunningServer, content: bytes) -> None:
    response = server.http.post(EXPLAIN, content=content, headers={"Content-Type": "application/json"})
    assert "needs a JSON object" in refused(response)["message"]


# --- whose prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS}),
        (TEXT, {"prompt": ["x", "y"]}),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_every_route_says_who_asks(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    before = len(server.engine.history())
    for client in (server.http, server.admin):
        ok(client.post(path, json=body))
    owners = [request.owner for request in server.engine.history()[before:]]
    half = len(owners) // 2
    assert set(owners[half:]) == {EVERYBODY}
    assert len(set(owners[:half])) == 1
    assert owners[0] not in (EVERYBODY, "an-api-key")
    reason = ok(server.http.post(EXPLAIN, json={"prompt": "x"}))["reason"]
    assert reason == f"The script says so to {owners[0]}."
    assert ok(server.admin.post(EXPLAIN, json={"prompt": "x"}))["reason"].endswith("to everybody.")


def test_without_keys_everybody_is_asked_for(dense: RunningServer) -> None:
    ok(dense.anonymous.post(TEXT, json={"prompt": "x"}))
    assert dense.engine.history()[-1].owner == EVERYBODY
    assert ok(dense.anonymous.post(EXPLAIN, json={"prompt": "x"}))["reason"].endswith("to everybody.")


# --- the figures of an answer -----------------------------------------------------------------------------------------


def test_an_answer_says_where_its_prompt_was(server: RunningServer) -> None:
    details = ok(server.http.post(TEXT, json={"prompt": "COUNT"}))["usage"]["prompt_tokens_details"]
    assert details == {
        "cached_tokens": 4,
        "vram_tokens": 4,
        "ram_tokens": 0,
        "disk_tokens": 0,
        "matched_tokens": 4,
        "replayed_tokens": 0,
    }


@pytest.mark.parametrize("wish", [False, None])
def test_no_explanation_unless_asked_for(server: RunningServer, wish: bool | None) -> None:
    usage = ok(server.http.post(TEXT, json={"prompt": "COUNT", "explain_cache": wish}))["usage"]
    assert "explanation" not in usage["prompt_tokens_details"]


def test_an_answer_with_its_explanation(server: RunningServer) -> None:
    body = {"prompt": ["COUNT me", "COUNT"], "n": 2, "explain_cache": True}
    details = ok(server.http.post(TEXT, json=body))["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 8
    assert details["explanation"] == ok(server.http.post(EXPLAIN, json=body))[0]


def test_the_openai_client_takes_all_of_it(server: RunningServer) -> None:
    asked: Any = {"model": "x", "extra_body": {"explain_cache": True}}
    messages: Any = [{"role": "user", "content": "COUNT"}]
    with server.openai() as client:
        chat = client.chat.completions.create(messages=messages, **asked)
        text = client.completions.create(prompt="COUNT", **asked)
        *events, last = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **asked
        )
    assert not any(event.usage for event in events)
    for usage in (chat.usage, text.usage, last.usage):
        assert usage is not None
        details = usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == 4
        extra = details.model_extra
        assert extra is not None
        assert (extra["vram_tokens"], extra["explanation"]["resumed_tokens"]) == (4, 4)


def test_llama_cpps_answer_with_its_explanation(server: RunningServer) -> None:
    answer = ok(server.http.post("/completion", json={"prompt": "COUNT", "explain_cache": True}))
    assert answer["cache_explanation"] == ok(server.http.post(EXPLAIN, json={"prompt": "COUNT"}))
    assert "cache_explanation" not in ok(server.http.post("/completion", json={"prompt": "COUNT"}))


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(server: RunningServer, **query: str | int | list[int]) -> Any:
    return ok(server.http.get("/v1/cache/plan", params={"prompt_tokens": 4000, **query}))


def test_a_plan_as_the_model_is_loaded(server: RunningServer) -> None:
    answer = plan(server)
    assert answer == {
        "model": "alpha",
        "recurrent": True,
        "prompt_tokens": 4000,
        "marks": [2048, 3840],
        "anchors": [],
        "kept": [2048, 3840],
        "checkpoint_bytes": 1000,
        "bytes": 2000,
        "budget_bytes": 4000,
        "capacity": 4,
        "passes": 3,
        "worst_overhead": 2047,
        "replay": [
            {"edit_from": 0, "edit_to": 2047, "resumed_tokens": 0, "prefilled_tokens": 3999},
            {"edit_from": 2048, "edit_to": 3839, "resumed_tokens": 2048, "prefilled_tokens": 1951},
            {"edit_from": 3840, "edit_to": 3999, "resumed_tokens": 3840, "prefilled_tokens": 159},
        ],
    }


def test_a_plan_with_other_settings(server: RunningServer) -> None:
    dense_grid = {"chunk_size": 1000, "recurrent_checkpoint_interval": 1024, "recurrent_checkpoint_interval_pp": 1024}
    assert plan(server, **dense_grid)["marks"] == [1024, 2048, 3072, 3840]
    placed = plan(server, boundaries="600,3000")
    assert (placed["anchors"], placed["marks"]) == ([512, 2816], [512, 2816, 3840])
    assert plan(server, boundaries=[600, 3000]) == placed
    none_fits = plan(server, sysmem_recurrent_cache=0)
    assert (none_fits["capacity"], none_fits["kept"], len(none_fits["replay"])) == (0, [], 1)
    assert plan(server, chunk_size="", boundaries="", model="") == plan(server)


PNG = b"\x89PNG\r\n"


def test_a_plan_as_a_picture(server: RunningServer) -> None:
    path = "/v1/cache/plan?prompt_tokens=4000"
    for query, accept in (("", "image/png"), ("&format=png", "application/json")):
        response = server.http.get(path + query, headers={"Accept": accept})
        assert (response.status_code, response.headers["Content-Type"]) == (200, "image/png")
        assert response.content.startswith(PNG)
    for query, accept in (("&format=json", "image/png"), ("", "text/html,image/png,*/*")):
        assert ok(server.http.get(path + query, headers={"Accept": accept}))["model"] == "alpha"


def test_a_picture_needs_matplotlib(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refused(server.http.get("/v1/cache/plan?prompt_tokens=4000&format=png"))
    assert (error["code"], "pip install matplotlib" in error["message"]) == ("unsupported", True)


def test_a_plan_without_recurrent_layers(dense: RunningServer) -> None:
    answer = plan(dense)
    assert (answer["recurrent"], answer["marks"], answer["worst_overhead"]) == (False, [], 0)
    error = refused(dense.http.get("/v1/cache/plan?prompt_tokens=10&format=png"))
    assert (error["param"], "no recurrent layers" in error["message"]) == ("format", True)


def test_a_plan_of_another_model(server: RunningServer) -> None:
    path = "/v1/cache/plan?prompt_tokens=10&model="
    assert ok(server.http.get(path + "alpha"))["model"] == "alpha"
    assert "needs the admin key" in refused(server.http.get(path + "beta"), 401)["message"]
    answer = ok(server.admin.get(path + "beta"))
    assert (answer["model"], answer["recurrent"]) == ("beta", False)
    missing = refused(server.admin.get(path + "gamma"), 404)
    assert (missing["code"], missing["param"]) == ("model_not_found", "model")
    assert refused(server.admin.get(path + "../beta"))["param"] == "model"
    assert ok(server.http.get("/v1/model"))["id"] == "alpha"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "prompt_tokens"),
        ("prompt_tokens=x", "prompt_tokens"),
        ("prompt_tokens=0", "prompt_tokens"),
        ("prompt_tokens=5000", "prompt_tokens"),
        ("prompt_tokens=9&chunk_size=0", "chunk_size"),
        ("prompt_tokens=9&recurrent_checkpoint_interval=1000", "recurrent_checkpoint_interval"),
        ("prompt_tokens=9&recurrent_checkpoint_interval_pp=-256", "recurrent_checkpoint_interval_pp"),
        ("prompt_tokens=9&sysmem_recurrent_cache=-1", "sysmem_recurrent_cache"),
        ("prompt_tokens=9&boundaries=1,x", "boundaries"),
        ("prompt_tokens=9&boundaries=1,50", "boundaries.1"),
        (f"prompt_tokens=9&boundaries={'1,' * 16}1", "boundaries"),
        ("prompt_tokens=9&format=gif", "format"),
    ],
)
def test_no_plan(server: RunningServer, query: str, param: str) -> None:
    assert refused(server.http.get(f"/v1/cache/plan?{query}"))["param"] == param
