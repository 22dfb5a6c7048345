"""The prompt cache of the tiny hybrid, seen over HTTP."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import parser

from tests.endpoints.running import eventually
from tests.models import SPECIAL_TOKENS, VOCABULARY
from tests.serving import ServerProcess

EXPLAIN = "/v1/cache/explain"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
# A part of a chat that ends with a tool's result.
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in few words. " * 40},
    {"role": "user", "content": "What is in the garden? " * 40},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "list_files", "arguments": '{"path": "/garden"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "lantern compass letter " * 40},
]


@pytest.fixture
def client(real_server: ServerProcess) -> Iterator[httpx.Client]:
    with real_server.client() as client:
        yield client


@pytest.fixture
def admin(real_server: ServerProcess) -> Iterator[httpx.Client]:
    with real_server.client(real_server.admin_key) as client:
        yield client


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def tokens(seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {place}").randrange(len(SPECIAL_TOKENS), VOCABULARY) for place in range(count)]


def edited(prompt: list[int], position: int) -> list[int]:
    """With another token at one place."""
    other = (prompt[position] + 1) % VOCABULARY
    return [*prompt[:position], max(other, len(SPECIAL_TOKENS)), *prompt[position + 1 :]]


def served(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage figures of an answer of one token."""
    usage: dict[str, Any] = ok(client.post(path, json={**body, "max_tokens": 1, "explain_cache": True}))["usage"]
    return usage


def comes_true(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What is explained before a prompt is served, after it was found to be so."""
    foretold: dict[str, Any] = ok(client.post(EXPLAIN, json=body))
    assert ok(client.post(EXPLAIN, json=body)) == foretold
    usage = served(client, path, body)
    details = usage["prompt_tokens_details"]
    assert details.pop("explanation") == foretold
    assert foretold["processed_tokens"] == usage["prompt_tokens"] - details["cached_tokens"]
    assert {"prompt_tokens": usage["prompt_tokens"], **details} == {
        "prompt_tokens": foretold["prompt_tokens"],
        "cached_tokens": foretold["resumed_tokens"],
        "vram_tokens": foretold["resumed_tokens"] - foretold["ram_tokens"] - foretold["disk_tokens"],
        "ram_tokens": foretold["ram_tokens"],
        "disk_tokens": foretold["disk_tokens"],
        "matched_tokens": foretold["matched_tokens"],
        "replayed_tokens": foretold["replayed_tokens"],
    }
    return foretold


def test_explanations_come_true(client: httpx.Client) -> None:
    base = tokens(1, 2700)
    assert comes_true(client, "/v1/completions", {"prompt": base})["resumed_tokens"] == 0
    for position, resumed in ((300, 0), (2100, 2048), (2699, 2560)):
        foretold = comes_true(client, "/v1/completions", {"prompt": edited(base, position)})
        assert foretold["resumed_tokens"] == resumed
        assert foretold["replayed_tokens"] == position // 256 * 256 - resumed
        assert foretold["difference"]["position"] == position
    again = comes_true(client, "/v1/completions", {"prompt": base})
    assert (again["resumed_tokens"], again["difference"]) == (2560, None)


def test_explanations_of_a_chat_with_tools_come_true(client: httpx.Client) -> None:
    path = "/v1/chat/completions"
    comes_true(client, path, {"messages": CHAT, "tools": TOOLS})
    longer = [*CHAT, {"role": "user", "content": "Thank you."}]
    assert comes_true(client, path, {"messages": longer, "tools": TOOLS})["resumed_tokens"] > 0
    other_result = [*CHAT[:3], CHAT[3] | {"content": "river " * 40}]
    difference = comes_true(client, path, {"messages": other_result, "tools": TOOLS})["difference"]
    assert difference["cached"].lstrip().startswith("lantern")
    assert difference["requested"].lstrip().startswith("river")
    other_system = [CHAT[0] | {"content": "Sing. " + CHAT[0]["content"]}, *CHAT[1:]]
    assert comes_true(client, path, {"messages": other_system, "tools": TOOLS})["resumed_tokens"] == 0


def test_a_key_is_shown_its_own_prompts_only(client: httpx.Client, admin: httpx.Client) -> None:
    prompt = tokens(2, 600)
    served(admin, "/v1/completions", {"prompt": prompt})
    body = {"prompt": edited(prompt, 400)}
    assert ok(admin.post(EXPLAIN, json=body))["difference"]["position"] == 400
    explanation = ok(client.post(EXPLAIN, json=body))
    assert (explanation["matched_tokens"], explanation["difference"]) == (256, None)
    served(client, "/v1/completions", {"prompt": prompt})
    assert ok(client.post(EXPLAIN, json=body))["difference"]["position"] == 400


def test_a_prompt_that_does_not_fit_is_refused_as_by_a_completion(client: httpx.Client) -> None:
    for body in ({"prompt": "word " * 40_000}, {"prompt": [VOCABULARY]}):
        refusals = [client.post(path, json=body) for path in (EXPLAIN, "/v1/completions")]
        assert [response.status_code for response in refusals] == [400, 400]
        assert refusals[0].json()["error"] == refusals[1].json()["error"]


def test_the_cache_is_seen_to_fill_and_cleared(client: httpx.Client, admin: httpx.Client) -> None:
    prompt = tokens(3, 2700)
    dropped = ok(admin.post("/v1/cache/clear"))
    empty = ok(admin.get("/v1/cache"))
    assert (empty["tiers"][0]["used_tokens"], empty["checkpoints"]["entries"]) == (0, [])
    plan = ok(client.get("/v1/cache/plan", params={"prompt_tokens": len(prompt)}))
    served(client, "/v1/completions", {"prompt": prompt})

    report = ok(admin.get("/v1/cache"))
    [vram] = report["tiers"]
    assert (vram["tier"], vram["used_tokens"]) == ("vram", len(prompt) // 256 * 256)
    assert 0 < vram["used_tokens"] < vram["capacity_tokens"]
    checkpoints = report["checkpoints"]
    assert [entry["position"] for entry in checkpoints["entries"]] == plan["marks"] == [2048, 2560]
    assert all(entry["usable"] and entry["age_seconds"] >= 0 for entry in checkpoints["entries"])
    assert checkpoints["used_bytes"] == plan["bytes"] == 2 * checkpoints["checkpoint_bytes"]
    assert (checkpoints["held"], checkpoints["usable"], checkpoints["capacity"]) == (2, 2, plan["capacity"])
    totals = ok(client.get("/cache"))
    assert totals["checkpoints"] == checkpoints | {"entries": None}
    hits = vram["hit_tokens"]
    served(client, "/v1/completions", {"prompt": prompt})
    assert ok(client.get("/v1/cache"))["tiers"][0]["hit_tokens"] == hits + 2560

    cleared = ok(admin.post("/v1/cache/clear"))
    assert cleared == {"pages": len(prompt) // 256, "checkpoints": 2}
    assert dropped.keys() == cleared.keys()
    gone = ok(client.post(EXPLAIN, json={"prompt": prompt}))
    assert (gone["matched_tokens"], gone["difference"]) == (0, None)


def test_a_bare_request(real_server: ServerProcess) -> None:
    """As curl sends it."""
    url = urlsplit(real_server.base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    headers = {"Authorization": f"Bearer {real_server.api_key}", "Accept": "*/*", "Content-Type": "application/json"}

    def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    try:
        status, report = ask("GET", "/v1/cache")
        assert (status, report["model"]) == (200, real_server.model)
        status, explanation = ask("POST", EXPLAIN, b'{"messages": [{"role": "user", "content": "Hello"}]}')
        assert (status, explanation["matched_tokens"], bool(explanation["reason"])) == (200, 0, True)
        assert ask("GET", "/v1/cache/plan?prompt_tokens=2000&boundaries=600")[1]["marks"] == [512, 1792]
        status, error = ask("POST", "/v1/cache/clear")
        assert (status, "admin key" in error["detail"]) == (401, True)
    finally:
        connection.close()


def test_the_openai_client_reads_the_figures(real_server: ServerProcess) -> None:
    with real_server.openai() as client:
        *_, last = client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"explain_cache": True},
        )
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    extra = last.usage.prompt_tokens_details.model_extra
    assert extra is not None
    assert extra["explanation"]["prompt_tokens"] == last.usage.prompt_tokens


def test_metrics_and_the_log_say_what_was_cached(real_server: ServerProcess, client: httpx.Client) -> None:
    prompt = tokens(4242, 1300)
    logged = len(log_lines(real_server))
    told = []
    for one in (prompt, prompt, edited(prompt, 900)):
        before = metrics(client)
        ok(client.post("/v1/completions", json={"prompt": one, "max_tokens": 2}))
        after = metrics(client)
        told.append({name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)})
    sources = [{name: change for name, change in changes.items() if "prompt_tokens" in name} for changes in told]
    assert sources == [
        {"waypoint_prompt_tokens_total new": 1300},
        {"waypoint_prompt_tokens_total vram": 1280, "waypoint_prompt_tokens_total new": 20},
        {"waypoint_prompt_tokens_total replayed": 768, "waypoint_prompt_tokens_total new": 532},
    ]
    assert [changes.get("waypoint_cache_hit_tokens_total vram", 0) for changes in told] == [0, 1280, 0]
    assert [changes.get("waypoint_checkpoint_hits_total ", 0) for changes in told] == [0, 1, 0]
    assert all(changes["waypoint_time_to_first_token_seconds_count "] == 1 for changes in told)
    assert all(changes["waypoint_generation_tokens_total "] == 2 for changes in told)
    eventually(lambda: len(log_lines(real_server)) == logged + 3)
    assert [line.partition("prompt ")[2].partition(" in ")[0] for line in log_lines(real_server)[-3:]] == [
        "1300 tokens: matched 0, resumed 0 (0 from RAM, 0 from disk), replayed 0, processed 1300",
        "1300 tokens: matched 1280, resumed 1280 (0 from RAM, 0 from disk), replayed 0, processed 20",
        "1300 tokens: matched 768, resumed 0 (0 from RAM, 0 from disk), replayed 768, processed 1300",
    ]


def log_lines(server: ServerProcess) -> list[str]:
    """Of finished answers."""
    return [line for line in server.log if "Generated" in line]


def metrics(client: httpx.Client) -> dict[str, float]:
    """By name and values of the labels."""
    text = client.get("/metrics").text
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name} {' '.join(sample.labels.values())}": sample.value for sample in samples}
