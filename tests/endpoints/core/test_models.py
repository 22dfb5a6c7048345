from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError

from common.errors import ErrorRecord
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Script

PROJECT = Path(__file__).parents[3]
HI = {"messages": [{"role": "user", "content": "hi"}]}


def names(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [card["id"] for card in response.json()["data"]]


def load_frames(server: RunningServer, **body: object) -> list[dict[str, Any]]:
    response = server.admin.post("/v1/model/load", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *data, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(entry) for entry in data]


def test_without_a_model_the_server_is_healthy_and_not_ready(empty_server: RunningServer) -> None:
    assert empty_server.anonymous.get("/health").json() == {"status": "healthy", "issues": []}
    response = empty_server.anonymous.get("/ready")
    assert response.status_code == 503
    assert "No model is loaded" in response.json()["detail"]
    assert [empty_server.anonymous.head(path).status_code for path in ("/health", "/ready")] == [200, 503]
    for method, path in (("GET", "/v1/model"), ("GET", "/props"), ("POST", "/v1/model/unload")):
        assert empty_server.admin.request(method, path).status_code == 503
    for path, body in (
        ("/v1/token/encode", {"text": "x"}),
        ("/v1/token/decode", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "x", "model": "gpt-4o"}),
        ("/v1/chat/completions", HI | {"stream": True}),
    ):
        response = empty_server.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_loaded")
    assert names(empty_server.http.get("/v1/models")) == []
    assert names(empty_server.admin.get("/v1/models")) == ["alpha", "beta"]


def test_lists_name_the_loaded_model_first(empty_server: RunningServer) -> None:
    (empty_server.engine.model_dir / "no-model").mkdir()
    empty_server.load("beta")
    for path in ("/v1/models", "/v1/model/list"):
        assert names(empty_server.http.get(path)) == ["beta"]
        assert names(empty_server.admin.get(path)) == ["beta", "alpha"]
    assert empty_server.anonymous.get("/ready").json() == {"status": "ready", "model": "beta"}


def test_the_openai_client_lists_and_retrieves(server: RunningServer) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["alpha"]
        model = client.models.retrieve("alpha")
        assert (model.id, model.object) == ("alpha", "model")
        with pytest.raises(NotFoundError) as caught:
            client.models.retrieve("beta")
    assert caught.value.code == "model_not_found"
    assert server.admin.get("/v1/models/beta").json()["id"] == "beta"


def test_card_of_the_loaded_model(server: RunningServer) -> None:
    card = server.http.get("/v1/model").json()
    assert card["id"] == "alpha"
    parameters = card["parameters"]
    expected = {
        "max_seq_len": 4096,
        "cache_size": 4096,
        "max_batch_size": 4,
        "cache_mode": "FP16",
        "chunk_size": 2048,
        "use_vision": False,
        "rope_scale": 1.0,
        "rope_alpha": 1.0,
        "draft": None,
        "prompt_template": "chat_template",
        "recurrent_checkpoint_interval": 2048,
        "recurrent_checkpoint_interval_pp": 32768,
        "recurrent_checkpoint_bytes": 1000,
        "recurrent_checkpoint_capacity": 4,
    }
    assert {name: parameters[name] for name in expected} == expected
    assert "<|im_start|>" in parameters["prompt_template_content"]
    props = server.http.get("/props").json()
    assert props["chat_template"] == parameters["prompt_template_content"]
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] == 4


def test_props_as_llama_cpp_has_them(empty_server: RunningServer) -> None:
    tokens = '{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}'
    (empty_server.engine.model_dir / "alpha" / "tokenizer_config.json").write_text(tokens, encoding="utf-8")
    empty_server.load("alpha")
    props = empty_server.http.get("/props").json()
    assert (props["bos_token"], props["eos_token"], props["model_path"]) == ("<s>", "</s>", "alpha")
    assert props["modalities"] == {"vision": False, "audio": False}
    parameters = props["default_generation_settings"]["params"]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "n_predict": -1}
    assert {name: parameters[name] for name in neutral} == neutral


def test_version_is_said_to_everybody(empty_server: RunningServer) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert empty_server.anonymous.get("/version").json() == {"version": project["version"]}
    assert empty_server.http.get("/openapi.json").json()["info"]["version"] == project["version"]
    assert empty_server.anonymous.get("/ping").status_code == 200


def test_a_model_without_recurrent_layers_has_no_checkpoints(scripted: ScriptedEngine) -> None:
    scripted.write(Script(models={"alpha": ModelScript(recurrent=False)}))
    with running_server(scripted).running() as server:
        server.load("alpha")
        parameters = server.http.get("/v1/model").json()["parameters"]
    checkpoints = {name: value for name, value in parameters.items() if name.startswith("recurrent_")}
    assert len(checkpoints) == 4
    assert set(checkpoints.values()) == {None}


def test_a_load_tells_its_progress_and_ends(empty_server: RunningServer) -> None:
    frames = load_frames(empty_server, model_name="alpha", recurrent_checkpoint_interval=1024, max_seq_len=2048)
    assert frames == [
        {"model_type": "model", "module": module, "modules": 3, "status": status}
        for module, status in ((1, "processing"), (2, "processing"), (3, "processing"), (3, "finished"))
    ]
    parameters = empty_server.http.get("/v1/model").json()["parameters"]
    assert parameters["recurrent_checkpoint_interval"] == 1024
    assert parameters["max_seq_len"] == 2048
    again = load_frames(empty_server, model_name="alpha", recurrent_checkpoint_interval=1024, max_seq_len=2048)
    assert [frame["status"] for frame in again] == ["processing", "finished"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "model_name"),
        ({"model_name": ""}, 400, "model_name"),
        ({"model_name": "../alpha"}, 400, "model_name"),
        ({"model_name": "gamma"}, 404, "model_name"),
        ({"model_name": "x" * 5000}, 404, "model_name"),
        ({"model_name": "alpha", "prompt_template": "x" * 5000}, 400, "prompt_template"),
        ({"model_name": "alpha", "recurrent_checkpoint_interval": 1000}, 400, "recurrent_checkpoint_interval"),
        ({"model_name": "alpha", "recurrent_checkpoint_interval_pp": 0}, 400, "recurrent_checkpoint_interval_pp"),
        ({"model_name": "alpha", "cache_size": 1000}, 400, "cache_size"),
        ({"model_name": "alpha", "prompt_template": "none-such"}, 400, "prompt_template"),
        ({"model_name": "alpha", "sampler_preset": "none-such"}, 404, "sampler_preset"),
        ({"model_name": "alpha", "tool_format": "none-such"}, 400, "tool_format"),
        ({"model_name": "alpha", "reasoning_mode": "maybe"}, 400, "reasoning_mode"),
        ({"model_name": "alpha", "start_in_reasoning": "sometimes"}, 400, "start_in_reasoning"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_anything_is_touched(
    server: RunningServer, body: dict[str, object], status: int, param: str
) -> None:
    response = server.admin.post("/v1/model/load", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert server.http.get("/v1/model").json()["id"] == "alpha"


def test_a_failed_load_is_told_and_the_old_model_is_back(scripted: ScriptedEngine) -> None:
    error = ErrorRecord(code="model_load_failed", message="the weights are torn")
    scripted.write(Script(models={"beta": ModelScript(load_error=error)}))
    with running_server(scripted).running() as server:
        server.load("alpha")
        response = server.admin.post("/v1/model/load", json={"model_name": "beta"})
        # Where the error comes soon it is a plain response, where it comes late it is a frame.
        assert "the weights are torn" in response.text
        assert server.http.post("/v1/chat/completions", json=HI).json()["model"] == "alpha"


def test_a_load_goes_on_when_its_client_goes(scripted: ScriptedEngine) -> None:
    scripted.write(Script(models={"alpha": ModelScript(load_seconds=2.0)}))
    with running_server(scripted).running() as server:
        with server.admin.stream("POST", "/v1/model/load", json={"model_name": "alpha"}) as response:
            assert "processing" in next(line for line in response.iter_lines() if line.startswith("data: "))
        assert server.manager.state == "loading"
        assert "being loaded" in server.anonymous.get("/ready").json()["detail"]
        eventually(lambda: server.manager.state == "ready")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unload(empty_server: RunningServer, method: str) -> None:
    empty_server.load("alpha")
    response = empty_server.admin.request(method, "/v1/model/unload")
    assert (response.status_code, response.json()) == (200, None)
    assert empty_server.anonymous.get("/ready").status_code == 503


def test_a_chat_template_by_name(empty_server: RunningServer) -> None:
    empty_server.load("alpha", prompt_template="alpaca")
    assert empty_server.http.get("/v1/model").json()["parameters"]["prompt_template"] == "alpaca"
    empty_server.http.post("/v1/chat/completions", json=HI)
    assert empty_server.engine.history()[-1].prompt == "### Instruction:\nhi\n\n### Response:\n"


FAMILIES = PROJECT / "tests" / "common" / "chat_templates"
SYNTAX = ("tool_format", "tool_format_source", "reasoning_tags", "reasoning_source")
TOOL = {"type": "function", "function": {"name": "ls"}}


def syntax_of(server: RunningServer) -> tuple[list[str | None], list[str]]:
    """What the model card says of calls, of thoughts, and its warnings."""
    card = server.http.get("/v1/model").json()["parameters"]
    return [card[name] for name in SYNTAX], card["warnings"]


def test_the_card_and_the_log_say_how_a_model_answers(empty_server: RunningServer, log_lines: list[str]) -> None:
    family = (FAMILIES / "glm.jinja").read_text(encoding="utf-8")
    (empty_server.engine.model_dir / "alpha" / "chat_template.jinja").write_text(family, encoding="utf-8")
    empty_server.load("alpha")
    written = "certain: the chat template writes it"
    assert f"Tool calls of alpha: glm4_5 ({written})" in log_lines
    assert f"Thoughts of alpha: <think> ... </think> ({written})" in log_lines
    assert syntax_of(empty_server) == (["glm4_5", written, "<think> ... </think>", written], [])
    empty_server.load("alpha", tool_format="mistral", reasoning=True, reasoning_start_token="<a>")
    assert syntax_of(empty_server)[0] == [
        "mistral",
        "set: tool_format is set",
        "<a> ... </think>",
        "set: reasoning_start_token and reasoning_end_token are set",
    ]
    empty_server.admin.post("/v1/template/unload")
    assert syntax_of(empty_server)[0] == [None, None, None, None]
    assert sum("Tool calls of alpha" in line for line in log_lines) == 2  # one for each load


def test_tools_for_a_model_of_which_nothing_is_known(empty_server: RunningServer, log_lines: list[str]) -> None:
    empty_server.load("alpha")
    nothing = "unknown: neither the chat template nor the tokenizer points to any"
    assert syntax_of(empty_server) == ([None, nothing, None, nothing], [])
    for _ in range(2):
        assert empty_server.http.post("/v1/chat/completions", json=HI | {"tools": [TOOL]}).status_code == 200
    _, [warning] = syntax_of(empty_server)
    assert "set tool_format" in warning
    assert [line for line in log_lines if "set tool_format" in line] == [f"alpha: {warning}"]
    prompt = empty_server.engine.history()[-1].prompt
    assert isinstance(prompt, str)
    assert '{"type": "function", "function": {"name": "ls"}}' in prompt
    assert "<tool_call>" in prompt
    empty_server.load("alpha", tool_format="mistral")
    assert empty_server.http.post("/v1/chat/completions", json=HI | {"tools": [TOOL]}).status_code == 200
    assert syntax_of(empty_server)[1] == []
    assert "[TOOL_CALLS]FUNCTION_NAME[ARGS]" in str(empty_server.engine.history()[-1].prompt)


def test_another_template_is_looked_at_anew(empty_server: RunningServer) -> None:
    family = (FAMILIES / "qwen3.jinja").read_text(encoding="utf-8")
    (empty_server.engine.model_dir / "alpha" / "chat_template.jinja").write_text(family, encoding="utf-8")
    empty_server.load("alpha", prompt_template="chatml")
    assert syntax_of(empty_server)[0][0] is None
    empty_server.http.post("/v1/chat/completions", json=HI | {"tools": [TOOL]})
    assert len(syntax_of(empty_server)[1]) == 1
    empty_server.load("alpha")
    empty_server.admin.post("/v1/template/switch", json={"prompt_template_name": "alpaca"})
    assert syntax_of(empty_server)[0][0] is None
    empty_server.admin.post("/v1/template/switch", json={"prompt_template_name": "chat_template"})
    assert syntax_of(empty_server)[0][0] == "hermes"


def test_a_template_that_goes_while_a_model_loads(scripted: ScriptedEngine, log_lines: list[str]) -> None:
    scripted.write(Script(models={"alpha": ModelScript(load_seconds=1.0)}))
    with running_server(scripted).running() as server:
        own = scripted.model_dir / "alpha" / "additional_chat_templates" / "mine.jinja"
        own.parent.mkdir()
        own.write_text("{{ messages }}", encoding="utf-8")
        load = {"model_name": "alpha", "prompt_template": "mine"}
        with server.admin.stream("POST", "/v1/model/load", json=load) as response:
            assert "processing" in next(line for line in response.iter_lines() if line.startswith("data: "))
            own.unlink()
        eventually(lambda: server.manager.state == "ready")
        eventually(lambda: any("alpha cannot chat" in line for line in log_lines))
        assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_service_info(server: RunningServer) -> None:
    info = server.anonymous.get("/.well-known/serviceinfo").json()
    assert info["api"]["openai"]["relative_url"] == "/v1"
