"""Kobold's routes that generate, on the scripted engine, where a token is a character and its id the code point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from common.generation import GenerationRequest
from common.sampling import SamplingParameters
from endpoints.answering import IGNORED_HEADER
from tests.endpoints.running import RunningServer, alpha_server, eventually
from tests.scripted_worker import Play

COUNTED = "one two three"
PLAYS = [
    Play(when="COUNT", chunks=["one ", "two ", "three"]),
    Play(when="STOP", chunks=["one ", "two"], stop_sequence="###"),
    Play(when="STALL", chunks=["a ", "b "], hang_after=2),
    Play(when="PREFILL", prefill=[(index, 100) for index in range(100)], delay=0.1),
    Play(when="FAIL", chunks=["half", "way"], fail_after=1),
    Play(when="LINES", chunks=["a\u2028b"]),
]

# SillyTavern's text for KoboldAI, with the values that its settings start with.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "Narrator: COUNT\nMira:",
    "gui_settings": False,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "max_context_length": 4096,
    "max_length": 250,
    "rep_pen": 1.1,
    "rep_pen_range": 600,
    "rep_pen_slope": 0,
    "temperature": 0.85,
    "tfs": 1,
    "top_a": 0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0,
    "typical": 1,
    "singleline": False,
    "use_story": False,
    "use_memory": False,
    "use_authors_note": False,
    "use_world_info": False,
    "use_default_badwordsids": False,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "grammar": None,
    "sampler_seed": None,
    "stop_sequence": ["\nNarrator:"],
}
# Kobold Lite's, with much of it turned on.
KOBOLD_LITE: dict[str, Any] = {
    "n": 1,
    "max_context_length": 4096,
    "max_length": 40,
    "rep_pen": 1.07,
    "temperature": 0.75,
    "top_p": 0.92,
    "top_k": 100,
    "top_a": 0.1,
    "typical": 0.9,
    "tfs": 0.97,
    "rep_pen_range": 360,
    "rep_pen_slope": 0.7,
    "sampler_order": [6, 5, 0, 1, 3, 4, 2],
    "memory": "Mira counts. ",
    "trim_stop": True,
    "genkey": "KCPP4711",
    "min_p": 0.05,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0.2,
    "nsigma": 0,
    "banned_tokens": ["shivers", "testament"],
    "render_special": False,
    "logprobs": False,
    "presence_penalty": 0.1,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 320,
    "dry_sequence_breakers": ["\n", ":"],
    "xtc_threshold": 0.2,
    "xtc_probability": 0.5,
    "logit_bias": {"9": -50},
    "quiet": True,
    "stop_sequence": ["You:"],
    "use_default_badwordsids": True,
    "sampler_seed": 2**63 + 5,
    "images": [],
    "prompt": "COUNT",
}


@pytest.fixture(scope="module")
def kobold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with alpha_server(tmp_path_factory.mktemp("kobold"), PLAYS, network={"api_servers": ["kobold"]}) as running:
        yield running


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def generate(server: RunningServer, **body: object) -> list[dict[str, Any]]:
    response = server.http.post("/api/v1/generate", json=body)
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    return results


def stream(server: RunningServer, **body: object) -> list[dict[str, Any]]:
    response = server.http.post("/api/extra/generate/stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    frames = response.text.removesuffix("\n\n").split("\n\n")
    events = [frame.split("\n") for frame in frames if not frame.startswith(":")]
    assert {name for name, _ in events} <= {"event: message", "event: error"}
    return [json.loads(data.removeprefix("data: ")) for _, data in events]


def check(client: httpx.Client, **body: str) -> list[str]:
    results = client.post("/api/extra/generate/check", json=body).json()["results"]
    return [result["text"] for result in results]


def last_request(server: RunningServer) -> GenerationRequest:
    return server.engine.history()[-1]


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "latest"])
def test_a_whole_answer(kobold: RunningServer, version: str) -> None:
    response = kobold.http.post(f"/api/{version}/generate", json={"prompt": "COUNT"})
    assert response.json() == {
        "results": [
            {
                "text": COUNTED,
                "finish_reason": "stop",
                "logprobs": None,
                "prompt_tokens": 5,
                "completion_tokens": 13,
            }
        ]
    }


def test_a_stream(kobold: RunningServer) -> None:
    assert stream(kobold, prompt="COUNT") == [
        *({"token": text, "finish_reason": None} for text in ["one ", "two ", "three"]),
        {"token": "", "finish_reason": "stop"},
    ]


def test_lines_of_a_stream_end_as_kobold_lite_wants_them(kobold: RunningServer) -> None:
    """Its pattern matches LF alone, and no line separator within the data."""
    text = kobold.http.post("/api/extra/generate/stream", json={"prompt": "LINES"}).text
    assert text.startswith('event: message\ndata: {"token":"a\\u2028b"')
    assert "\r" not in text.partition(": ping")[0]


def test_length(kobold: RunningServer) -> None:
    [result] = generate(kobold, prompt="COUNT", max_length=4)
    assert (result["text"], result["finish_reason"]) == ("one ", "length")
    assert stream(kobold, prompt="COUNT", max_length=4)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("trim_stop", "text"), [(True, "one two"), (False, "one two###")])
def test_the_stop_sequence_on_request(kobold: RunningServer, trim_stop: bool, text: str) -> None:
    body = {"prompt": "STOP", "stop_sequence": ["###"], "trim_stop": trim_stop}
    assert generate(kobold, **body)[0]["text"] == text
    assert "".join(event["token"] for event in stream(kobold, **body)) == text


def test_several_answers_but_not_in_a_stream(kobold: RunningServer) -> None:
    assert [result["text"] for result in generate(kobold, prompt="COUNT", n=2)] == [COUNTED, COUNTED]
    response = kobold.http.post("/api/extra/generate/stream", json={"prompt": "COUNT", "n": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_log_probabilities(kobold: RunningServer) -> None:
    [result] = generate(kobold, prompt="COUNT", logprobs=True, max_length=1)
    [entry] = result["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], len(entry["top_logprobs"])) == ("o", -0.5, 5)
    first, *_ = stream(kobold, prompt="COUNT", logprobs=True, max_length=1)
    assert first["logprobs"]["content"] == [entry]


# --- fields -------------------------------------------------------------------------------------------------------


def test_sillytaverns_fields(kobold: RunningServer) -> None:
    [result] = generate(kobold, **SILLYTAVERN)
    assert result["text"] == COUNTED
    request = last_request(kobold)
    assert (request.prompt, request.max_tokens, request.seed) == (SILLYTAVERN["prompt"], 250, None)
    assert request.stop_strings == ["\nNarrator:"]
    assert request.sampling == SamplingParameters(
        temperature=0.85, temperature_last=True, top_k=40, top_p=0.95, repetition_penalty=1.1, penalty_range=600
    )


def test_kobold_lites_fields(kobold: RunningServer) -> None:
    response = kobold.http.post("/api/v1/generate", json=KOBOLD_LITE)
    lacking = {"top_a", "tfs", "typical", "smoothing_factor", "dynatemp_range", "rep_pen_slope"}
    assert set(response.headers[IGNORED_HEADER].split(", ")) == lacking
    request = last_request(kobold)
    assert (request.prompt, request.seed) == ("Mira counts. COUNT", 5)
    assert request.banned_strings == ["shivers", "testament"]
    assert request.sampling == SamplingParameters(
        temperature=0.75,
        top_k=100,
        top_p=0.92,
        min_p=0.05,
        repetition_penalty=1.07,
        penalty_range=360,
        presence_penalty=0.1,
        dry_multiplier=0.8,
        dry_range=320,
        dry_sequence_breakers=["\n", ":"],
        xtc_threshold=0.2,
        xtc_probability=0.5,
        logit_bias={9: -50},
        ban_eos_token=True,
    )


@pytest.mark.parametrize(
    ("order", "last"),
    [([], True), ([6, 0, 1, 3, 4, 2, 5], True), ([6, 0, 5, 2], True), ([5, 6, 0, 2], False), ([6], True)],
)
def test_the_place_of_the_temperature(kobold: RunningServer, order: list[int], last: bool) -> None:
    generate(kobold, prompt="COUNT", sampler_order=order)
    assert last_request(kobold).sampling.temperature_last is last


def test_other_fields(kobold: RunningServer) -> None:
    generate(
        kobold,
        prompt="COUNT",
        rep_pen_range=0,
        singleline=True,
        banned_tokens=[5, "so"],
        banned_strings=["oh"],
        sampler_seed=-1,
        bypass_eos=True,
    )
    request = last_request(kobold)
    assert (request.sampling.penalty_range, request.sampling.banned_tokens) == (-1, [5])
    assert (request.banned_strings, request.stop_strings, request.seed) == (["oh", "so"], ["\n"], None)
    assert request.sampling.ban_eos_token is True


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"max_context_length": 100, "max_length": 20}, "x" * 75 + "COUNT"),
        ({"max_context_length": 100, "max_length": 90}, "x" * 45 + "COUNT"),  # half of it at least
        ({"max_context_length": 100}, "x" * 45 + "COUNT"),
        ({"max_context_length": 100, "max_length": 20, "memory": "m" * 10}, "m" * 10 + "x" * 65 + "COUNT"),
        ({"max_context_length": 100, "max_length": 20, "memory": "m" * 90 + "n"}, "m" * 39 + "n" + "x" * 35 + "COUNT"),
        ({"max_context_length": 99_999, "max_length": 96}, "x" * 3995 + "COUNT"),
        ({"max_context_length": 4096, "max_length": 20, "memory": "m"}, "mCOUNT"),
    ],
)
def test_what_is_cut_of_a_prompt(kobold: RunningServer, fields: dict[str, Any], prompt: str) -> None:
    given = "COUNT" if prompt == "mCOUNT" else "x" * 8000 + "COUNT"
    generate(kobold, prompt=given, **fields)
    sent = last_request(kobold).prompt
    assert (sent if isinstance(sent, str) else "".join(map(chr, sent))) == prompt


def test_what_has_no_place_in_an_answer(kobold: RunningServer) -> None:
    """Fields of completions that would make more of it than Kobold's clients read."""
    results = generate(kobold, prompt="COUNT", best_of=3, echo=True, prompt_logprobs=1)
    assert [result["text"] for result in results] == [COUNTED]


def test_without_a_length_nothing_is_cut(kobold: RunningServer) -> None:
    response = kobold.http.post("/api/v1/generate", json={"prompt": "x" * 5000})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


# --- errors -------------------------------------------------------------------------------------------------------


def test_errors_are_koboldais(kobold: RunningServer) -> None:
    for method, path in [("POST", "/api/v1/generate"), ("GET", "/api/v1/model")]:
        response = kobold.anonymous.request(method, path)
        assert response.status_code == 401
        assert response.json()["detail"]["type"] == "authentication_error"
    response = kobold.http.post("/api/v1/generate", json={"prompt": ["COUNT"]})
    assert (response.status_code, response.json()["detail"]) == (
        400,
        {"msg": 'prompt should be a string, not ["COUNT"].', "type": "invalid_request_error"},
    )
    response = kobold.http.post("/api/v1/generate", json={"prompt": "COUNT", "images": ["aGk="]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "images")


def test_a_stream_that_fails_says_so(kobold: RunningServer) -> None:
    first, last = stream(kobold, prompt="FAIL")
    assert first["token"] == "half"
    assert last["detail"] == {"msg": last["error"]["message"], "type": "server_error"}


def test_a_body_is_json_whatever_it_is_called(kobold: RunningServer) -> None:
    """curl calls it a form where it is not told."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    response = kobold.http.post("/api/v1/generate", content='{"prompt": "COUNT"}', headers=form)
    assert response.json()["results"][0]["text"] == COUNTED


# --- check and abort ----------------------------------------------------------------------------------------------


def test_the_text_so_far_and_an_abort(kobold: RunningServer, background: ThreadPoolExecutor) -> None:
    answer = background.submit(generate, kobold, prompt="STALL", genkey="KCPP1")
    eventually(lambda: check(kobold.http, genkey="KCPP1") == ["a b "])
    assert kobold.http.get("/api/extra/generate/check", params={"genkey": "KCPP1"}).json() == {
        "results": [{"text": "a b "}]
    }
    # Nobody else can see it or end it, whoever guesses its key.
    assert check(kobold.other, genkey="KCPP1") == check(kobold.admin, genkey="KCPP1") == []
    assert kobold.other.post("/api/extra/abort", json={"genkey": "KCPP1"}).json() == {"success": True}
    assert check(kobold.http, genkey="KCPP2") == []
    kobold.http.post("/api/extra/abort", json={"genkey": "KCPP2"})
    assert kobold.requests_in_engine == 1

    assert kobold.http.post("/api/extra/abort", json={"genkey": "KCPP1"}).json() == {"success": True}
    [result] = answer.result(30)
    assert (result["text"], result["finish_reason"], result["completion_tokens"]) == ("a b ", "abort", 4)
    eventually(kobold.idle)
    assert check(kobold.http, genkey="KCPP1") == ["a b "]  # for a while


def test_an_aborted_stream(kobold: RunningServer, background: ThreadPoolExecutor) -> None:
    """SillyTavern's abort has no body, as its requests have no key."""
    events = background.submit(stream, kobold, prompt="STALL")
    eventually(lambda: check(kobold.http) == ["a b "])
    assert kobold.http.get("/api/extra/generate/check").json()["results"] == [{"text": "a b "}]
    assert check(kobold.other) == []
    kobold.http.post("/api/extra/abort")
    assert [event["finish_reason"] for event in events.result(30)] == [None, None, "abort"]
    eventually(kobold.idle)


def test_an_abort_during_the_prefill(kobold: RunningServer, background: ThreadPoolExecutor) -> None:
    answer = background.submit(generate, kobold, prompt="PREFILL", genkey="early")
    eventually(lambda: kobold.requests_in_engine == 1)
    kobold.http.post("/api/extra/abort", json={"genkey": "early"})
    [result] = answer.result(30)
    assert (result["text"], result["finish_reason"]) == ("", "abort")
    eventually(kobold.idle)


@pytest.mark.parametrize(
    ("path", "patience"),
    [("/api/v1/generate", 1.0), ("/api/extra/generate/stream", 1.0), ("/api/extra/generate/stream", 0.0)],
)
def test_an_abort_while_the_model_is_loaded(
    kobold: RunningServer,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    patience: float,
) -> None:
    """Also of a stream whose headers are there already, as they are when patience has run out."""

    async def loading(*arguments: object, **options: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(kobold.state, "serving", loading)
    monkeypatch.setattr("endpoints.answering.ACCEPT_SECONDS", patience)
    body = {"prompt": "COUNT", "genkey": f"waits{path}{patience}"}
    answer = background.submit(kobold.http.post, path, json=body)
    eventually(lambda: check(kobold.http, genkey=body["genkey"]) == [""])
    kobold.other.post("/api/extra/abort", json={"genkey": body["genkey"]})
    kobold.http.post("/api/extra/abort", json={"genkey": body["genkey"]})
    text = answer.result(30).text
    if path.endswith("stream"):
        text = text.replace(": ping\n\n", "")
        assert text == 'event: message\ndata: {"token":"","finish_reason":"abort"}\n\n'
    else:
        [result] = json.loads(text)["results"]
        assert (result["text"], result["finish_reason"]) == ("", "abort")


def test_the_next_generation_of_a_key(kobold: RunningServer) -> None:
    generate(kobold, prompt="COUNT", genkey="again", max_length=3)
    generate(kobold, prompt="COUNT", genkey="again")
    assert check(kobold.http, genkey="again") == [COUNTED]


def test_how_the_last_answer_went(kobold: RunningServer) -> None:
    generate(kobold, prompt="COUNT")
    performance = kobold.http.get("/api/extra/perf").json()
    assert (performance["last_input_count"], performance["last_token_count"]) == (5, 13)
    assert (performance["queue"], performance["idle"]) == (0, 1)
    assert kobold.other.get("/api/extra/perf").json()["last_token_count"] == 0


# --- what front ends ask before they begin ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/api/v1/model", {"result": "Waypoint/alpha"}),
        ("/api/latest/model", {"result": "Waypoint/alpha"}),
        ("/api/v1/config/max_length", {"value": 4096}),
        ("/api/latest/config/max_context_length", {"value": 4096}),
        ("/api/extra/true_max_context_length", {"value": 4096}),
    ],
)
def test_the_model(kobold: RunningServer, path: str, answer: dict[str, Any]) -> None:
    assert kobold.http.get(path).json() == answer
    assert kobold.anonymous.get(path).status_code == 401


def test_what_anybody_may_ask(kobold: RunningServer) -> None:
    client = kobold.anonymous
    assert client.get("/api/v1/info/version").json() == {"result": "1.2.5"}
    version = client.get("/api/extra/version").json()
    assert (version["result"], version["protected"], version["vision"]) == ("KoboldCpp", True, False)
    assert client.get("/api/latest/config/soft_prompts_list").json() == {"values": []}
    assert client.get("/api/v1/config/soft_prompt").json() == {"value": ""}
    assert client.put("/api/v1/config/soft_prompt", json={"value": "x"}).json() == {}
    info = client.get("/.well-known/serviceinfo").json()
    assert info["api"]["koboldai"]["relative_url"] == "/api"


def test_tokens(kobold: RunningServer) -> None:
    assert kobold.http.post("/api/extra/tokencount", json={"prompt": "hi"}).json() == {"value": 2, "ids": [104, 105]}
    assert kobold.http.post("/api/extra/detokenize", json={"ids": [104, 105]}).json() == {
        "result": "hi",
        "success": True,
    }


def test_other_apis_are_not_there(kobold: RunningServer) -> None:
    assert kobold.http.post("/v1/completions", json={"prompt": "COUNT"}).status_code == 404
    assert kobold.http.get("/api/tags").status_code == 404
