from __future__ import annotations

from typing import Any

import pytest

from tests.endpoints.running import RunningServer

HI = {"messages": [{"role": "user", "content": "hi"}]}


def post(server: RunningServer, path: str, body: object) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 99}, "temperature", "temperature should be less than or equal to 10, not 99"),
        ({"top_p": "x"}, "top_p", 'not "x"'),
        ({"n": 0}, "n", "greater than or equal to 1, not 0"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20, not 21"),
        ({"stop": [-1]}, "stop", "must be a string, or a list of strings and token ids"),
        ({"stop": {"a": 1}}, "stop", "must be a string, or a list of strings and token ids"),
        ({"min_tokens": 50, "max_tokens": 10}, "min_tokens", "min_tokens (50) must not be larger than max_tokens (10)"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
        ({"messages": []}, "messages", "at least 1 item"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages.0.content",
            "a string or a list of content parts, not 7",
        ),
        ({"messages": [{"role": "user", "content": [{"text": 7}]}]}, "messages.0.content.0.text", "string, not 7"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ],
)
def test_a_refusal_names_the_field(server: RunningServer, fields: dict[str, object], param: str, said: str) -> None:
    error = post(server, "/v1/chat/completions", HI | fields)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.type"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"regex_pattern": "a+"}, "regex_pattern"),
        ({"grammar_string": "root ::= x"}, "grammar_string"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_output_is_never_silently_unconstrained(server: RunningServer, fields: dict[str, object], param: str) -> None:
    error = post(server, "/v1/chat/completions", HI | fields)
    assert (error["code"], error["param"]) == ("unsupported", param)


def test_broken_json_is_told_with_its_place(server: RunningServer) -> None:
    response = server.http.post(
        "/v1/completions", content=b'{"prompt": "x",}', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]
    assert "character 15" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": "x", "max_tokens": ' + b"1" * 5000 + b"}"]
)
def test_a_body_that_json_cannot_read(server: RunningServer, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "cannot be read as JSON" in response.json()["error"]["message"]


def test_a_token_id_that_no_model_has(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": [10**30]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("content", [b"", b"[1]", b'"text"', b"null"])
def test_a_body_that_is_no_object(server: RunningServer, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_declared_as_json(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_unknown_routes_and_methods_have_the_envelope(server: RunningServer) -> None:
    unknown, wrong = server.http.get("/v1/nothing"), server.http.get("/v1/completions")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"


def test_tabbys_own_routes_repeat_the_message_as_detail(server: RunningServer) -> None:
    body = server.admin.post("/v1/model/load", json={"model_name": "gamma"}).json()
    assert body["detail"] == body["error"]["message"]
    assert "detail" not in server.http.post("/v1/completions", json={}).json()


def test_a_server_error_says_when_to_try_again(empty_server: RunningServer) -> None:
    response = empty_server.http.post("/v1/chat/completions", json=HI | {"model": "gpt-4o"})
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "5"
    assert response.json()["error"]["code"] == "model_not_loaded"


def test_the_unexpected_is_told_without_details(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("endpoints.OAI.router.new_envelope", explode)
    response = server.http.post("/v1/chat/completions", json=HI, headers={"X-Request-Id": "find-me"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "find-me" in response.json()["error"]["message"]
    assert response.headers["X-Request-Id"] == "find-me"


def test_an_engine_failure_of_one_request_is_an_error_response(server: RunningServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "FAIL"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"
