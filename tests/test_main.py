"""The server as its users meet it: a process, a socket, the real engine, OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loguru import logger
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from common.auth import KeyStore
from common.config_models import Settings
from common.sampling import SamplerPresets
from common.tabby_config import LoadedSettings
from main import EXIT_INTERRUPTED, EXIT_SETTINGS, load_at_start, main
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script
from tests.serving import ROOT, ServerProcess, served

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
TURN: ChatCompletionUserMessageParam = {"role": "user", "content": "Ada measured the river."}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("server"), "--chunk-size", "512", model=tiny_llama) as process:
        yield process


@pytest.fixture
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


# --- OpenAI's client, validating strictly -------------------------------------------------------------------------


def test_models(openai: OpenAI, server: ServerProcess) -> None:
    assert [model.id for model in openai.models.list()] == [server.model]
    assert openai.models.retrieve(str(server.model)).id == server.model


def test_chat(openai: OpenAI, server: ServerProcess) -> None:
    answer = openai.chat.completions.create(model="any", messages=[TURN], **GREEDY)
    assert answer.model == server.model
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None


def test_streamed_chat_says_the_same(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(model="any", messages=[TURN], **GREEDY)
    chunks = list(
        openai.chat.completions.create(
            model="any",
            messages=[TURN],
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in pieces)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_text_and_of_token_ids_agree(openai: OpenAI, server: ServerProcess) -> None:
    with server.client() as http:
        tokens = http.post("/v1/token/encode", json={"text": "The engine"}).json()["tokens"]
    by_text = openai.completions.create(model="any", prompt="The engine", **GREEDY)
    by_ids = openai.completions.create(model="any", prompt=tokens, **GREEDY)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(tokens)


def test_stop_strings_end_the_answer_and_are_not_part_of_it(openai: OpenAI) -> None:
    whole = openai.completions.create(model="any", prompt="The engine", temperature=0, max_tokens=20).choices[0].text
    stop = whole[4:6]
    cut = openai.completions.create(model="any", prompt="The engine", temperature=0, max_tokens=20, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_seeded_answers_repeat(openai: OpenAI) -> None:
    def text(seed: int) -> str:
        answer = openai.completions.create(model="any", prompt="The", seed=seed, max_tokens=16, temperature=1.5)
        return answer.choices[0].text

    assert text(7) == text(7) != text(8)


# --- long prompts -------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_cached(server: ServerProcess) -> None:
    body = {"prompt": [5 + i % 700 for i in range(1200)], **GREEDY}
    with server.client() as http:
        cold, warm = (http.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] > 1000


def test_a_prompt_that_is_too_long_is_refused_with_what_fits(server: ServerProcess) -> None:
    with server.client() as http:
        for stream in (False, True):
            response = http.post("/v1/completions", json={"prompt": [7] * 20_000, "stream": stream})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "20000 tokens, which exceeds the available context size: at most 16382 fit" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_prefill_frees_the_engine(server: ServerProcess, stream: bool) -> None:
    prompt = [5 + i * (2 + stream) % 900 for i in range(4000)]
    with server.client() as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"prompt": prompt, "stream": stream}, timeout=0.2)
        # The engine learns of the cancellation before this request; what it had not yet read stays unread.
        assert http.post("/v1/completions", json={"prompt": "The", **GREEDY}).status_code == 200
        usage = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < 3500


# --- the checkpoint feature from outside --------------------------------------------------------------------------


def card(server: ServerProcess) -> dict[str, Any]:
    with server.client() as http:
        parameters: dict[str, Any] = http.get("/v1/model").json()["parameters"]
        return parameters


def load(server: ServerProcess, **body: object) -> list[Any]:
    with server.client(server.admin_key) as http:
        response = http.post("/v1/model/load", json={"model_name": server.model, **body})
        assert response.status_code == 200, response.text
        data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(item) for item in data]


def test_both_intervals_by_api_load_are_in_force_and_on_the_card(real_server: ServerProcess) -> None:
    events = load(real_server, recurrent_checkpoint_interval=1024, recurrent_checkpoint_interval_pp=2048)
    assert events[-1]["status"] == "finished"
    parameters = card(real_server)
    assert parameters["recurrent_checkpoint_interval"] == 1024
    assert parameters["recurrent_checkpoint_interval_pp"] == 2048
    assert parameters["recurrent_checkpoint_bytes"] > 0
    assert parameters["recurrent_checkpoint_capacity"] > 0
    assert any("Using recurrent checkpoint intervals: 1024" in line for line in real_server.log)


@pytest.mark.parametrize("key", ["recurrent_checkpoint_interval", "recurrent_checkpoint_interval_pp"])
@pytest.mark.parametrize("value", [1000, 0, -256, 1.5, True, "x"])
def test_a_refused_interval_leaves_the_model_that_serves(real_server: ServerProcess, key: str, value: object) -> None:
    before = card(real_server)
    with real_server.client(real_server.admin_key) as http:
        response = http.post("/v1/model/load", json={"model_name": real_server.model, key: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == key
    assert response.json()["detail"] == response.json()["error"]["message"]
    assert card(real_server) == before


def test_intervals_from_the_command_line_the_model_file_and_use_as_default(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tabby_config.yml` outranks the server's own file, single options outrank both; an API load sees what
    `use_as_default` names."""
    scripted.write(Script())
    folder = scripted.model_dir / "alpha"
    (folder / "tabby_config.yml").write_text("model:\n  recurrent_checkpoint_interval_pp: 512\n", encoding="utf-8")
    (scripted.root / "config.yml").write_text(
        "model:\n"
        "  use_as_default: [recurrent_checkpoint_interval]\n"
        "  recurrent_checkpoint_interval: 1024\n"
        "  recurrent_checkpoint_interval_pp: 4096\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = (sys.executable, "-m", "tests.faults.scripted_main", str(scripted.script_path))
    options = ("--recurrent-checkpoint-interval", "256")
    with served(scripted.root, *options, model=folder, program=program) as server:
        parameters = card(server)
        assert parameters["recurrent_checkpoint_interval"] == 256
        assert parameters["recurrent_checkpoint_interval_pp"] == 512
        load(server)
        parameters = card(server)
        assert parameters["recurrent_checkpoint_interval"] == 256
        assert parameters["recurrent_checkpoint_interval_pp"] == 512
        load(server, recurrent_checkpoint_interval_pp=1024)
        assert card(server)["recurrent_checkpoint_interval_pp"] == 1024


# --- starting -----------------------------------------------------------------------------------------------------


def test_health_answers_before_the_model_does_and_a_failed_start_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "broken"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}', encoding="utf-8")
    with served(tmp_path, model=folder, ready=False) as server, server.client() as http:
        while http.get("/ready").json()["error"]["message"].endswith("in a moment."):
            time.sleep(0.05)
        response = http.get("/ready")
        assert response.status_code == 503
        assert "NoSuchForCausalLM" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["sampler_preset", "prompt_template"])
def test_a_start_model_whose_files_are_missing_is_not_loaded(scripted: ScriptedEngine, key: str) -> None:
    model = {"model_name": "alpha", "model_dir": str(scripted.model_dir), key: "none-such"}
    loaded = LoadedSettings(Settings.model_validate({"model": model}), {}, [], {})
    manager = scripted.manager()
    asyncio.run(load_at_start(loaded, manager, SamplerPresets()))
    assert manager.current is None
    assert "none-such" in str(manager.load_error)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_the_server_without_a_traceback(tmp_path: Path, keys: bool) -> None:
    with served(tmp_path, *([] if keys else ["--disable-auth", "true"])) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == EXIT_INTERRUPTED
    assert not any("Traceback" in line for line in server.log)


def test_keys_are_made_on_a_first_start_and_never_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    sink = logger.add(lines.append)
    KeyStore.open(tmp_path / "api_tokens.yml")
    logger.remove(sink)
    content = (tmp_path / "api_tokens.yml").read_text(encoding="utf-8")
    keys = [line.split('"')[1] for line in content.splitlines()]
    assert len(keys) == 2
    assert not any(key in line for key in keys for line in lines)


def test_broken_settings_stop_the_start_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yml").write_text("model:\n\tmax_seq_len: 4096\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main([]) == EXIT_SETTINGS
    assert "config.yml, line 2" in capsys.readouterr().err


def test_export_config_and_export_openapi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export-config"]) == 0
    assert "recurrent_checkpoint_interval_pp:" in (tmp_path / "config_sample.yml").read_text(encoding="utf-8")
    assert main(["export-openapi", "--export-path", "api.json"]) == 0
    assert "/v1/chat/completions" in json.loads((tmp_path / "api.json").read_text(encoding="utf-8"))["paths"]


@pytest.mark.parametrize("command", ["export-config", "export-openapi"])
def test_an_export_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--export-path", "no-such-folder/file"]) == EXIT_SETTINGS
    assert "no-such-folder/file cannot be written" in capsys.readouterr().err
