"""What Ollama's clients are told about models, and how they load and unload them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import ollama
import pytest

from tests.endpoints.Ollama.clients import ollama_client
from tests.endpoints.running import RunningServer, eventually, running_server
from tests.pictures import RED, picture
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "quantization_config": {"quant_method": "exl3", "bits": 4.0},
}
MULTIMODAL = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 1024, "torch_dtype": "bfloat16"}}
THINKING = "{% if enable_thinking %}<think>\n{% endif %}{{ tools }}{{ messages[0].content.split('</think>')[-1] }}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    engine = ScriptedEngine(tmp_path_factory.mktemp("ollama"))
    for name, config in (("alpha", CONFIG), ("beta", MULTIMODAL)):
        directory = engine.add_model(name)
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (directory / "model.safetensors").write_bytes(bytes(1000))
    engine.write(Script(plays=[Play(when="COUNT", chunks=["one"])]))
    return engine


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    """Every key may load models, of which one is up at a time."""
    with running_server(engine, model={"inline_model_loading": True, "aliases": {"gpt": "beta"}}).running() as running:
        running.load("alpha")
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama_client(server.base_url) as client:
        yield client


def names_up(client: ollama.Client) -> list[str]:
    return [model.model or "" for model in client.ps().models]


# --- what there is ------------------------------------------------------------------------------------------------


def test_the_list(client: ollama.Client) -> None:
    models = {model.model: model for model in client.list().models}
    assert set(models) == {"alpha:latest", "beta:latest"}
    alpha, beta = models["alpha:latest"], models["beta:latest"]
    assert alpha.size is not None
    assert alpha.size > 1000
    assert alpha.modified_at is not None
    assert alpha.details is not None
    assert beta.details is not None
    assert (alpha.details.family, alpha.details.format, alpha.details.quantization_level) == ("llama", "exl3", "4.0bpw")
    assert (beta.details.format, beta.details.quantization_level) == ("safetensors", "BF16")
    assert len(alpha.digest or "") == 64
    assert alpha.digest != beta.digest
    assert client.list().models[0].digest == alpha.digest


def test_a_model_that_is_up(client: ollama.Client, server: RunningServer) -> None:
    server.load("alpha")
    shown = client.show("alpha")
    assert shown.template is not None
    assert "<|im_start|>" in shown.template
    assert shown.capabilities == ["completion"]
    assert dict(shown.modelinfo or {}) == {
        "general.architecture": "llama",
        "general.basename": "alpha",
        "llama.context_length": 4096,  # as it was loaded
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
    }
    assert client.show("alpha:latest") == shown


def test_a_model_that_is_not(client: ollama.Client, server: RunningServer, engine: ScriptedEngine) -> None:
    template = engine.model_dir / "beta" / "chat_template.jinja"
    before = template.read_text(encoding="utf-8")
    template.write_text(THINKING, encoding="utf-8")
    try:
        shown = client.show("beta")
    finally:
        template.write_text(before, encoding="utf-8")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.modelinfo or {})["gemma3.context_length"] == 1024
    assert client.show("gpt").details == shown.details


def test_what_is_up(client: ollama.Client, server: RunningServer) -> None:
    server.load("alpha")
    [model] = client.ps().models
    assert (model.model, model.name, model.context_length, model.size_vram) == ("alpha:latest", "alpha:latest", 4096, 0)
    assert model.expires_at is not None
    assert model.expires_at > datetime.now(UTC) + timedelta(days=10_000)  # never


def test_images_for_a_model_that_sees_none(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "hi", "images": [picture(RED)]}]
    with pytest.raises(ollama.ResponseError, match=r"messages\.0\.images\.0 is an image") as error:
        client.chat("alpha", messages)
    assert error.value.status_code == 400


def test_what_has_no_config_that_can_be_read(client: ollama.Client, engine: ScriptedEngine) -> None:
    directory = engine.add_model("broken")
    (directory / "config.json").write_text("{", encoding="utf-8")
    strange = {"model_type": "\ud800", "text_config": [], "quantization_config": {"quant_method": "exl3", "bits": None}}
    (engine.add_model("strange") / "config.json").write_text(json.dumps(strange), encoding="utf-8")
    try:
        assert "broken:latest" in [model.model for model in client.list().models]
        assert client.show("broken").capabilities == ["completion"]
        assert client.show("strange").capabilities == ["completion"]
    finally:
        for name in ("broken", "strange"):
            (engine.model_dir / name / "config.json").unlink()


# --- loading and unloading ----------------------------------------------------------------------------------------


def test_unknown_models(client: ollama.Client) -> None:
    asks: list[Callable[[], object]] = [
        lambda: client.chat("nope", [{"role": "user", "content": "COUNT"}]),
        lambda: client.generate("nope", "COUNT"),
        lambda: client.generate("nope"),
        lambda: client.generate("nope", keep_alive=0),
        lambda: client.show("nope"),
        lambda: client.embed("nope", "COUNT"),
    ]
    for ask in asks:
        with pytest.raises(ollama.ResponseError, match="model 'nope' not found") as error:
            ask()
        assert error.value.status_code == 404


def test_a_model_is_loaded_for_its_request(client: ollama.Client) -> None:
    answer = client.chat("gpt:latest", [{"role": "user", "content": "COUNT"}])
    assert (answer.model, answer.message.content) == ("gpt:latest", "one")
    assert names_up(client) == ["beta:latest"]


def test_openais_api_takes_the_listed_names_too(server: RunningServer, client: ollama.Client) -> None:
    """VS Code lists models with this API, and chats with that."""
    [name] = names_up(client)
    body = {"model": name, "messages": [{"role": "user", "content": "COUNT"}]}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert names_up(client) == [name]


def test_loading_without_a_prompt(client: ollama.Client) -> None:
    answer = client.generate("alpha")
    assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
    assert names_up(client) == ["alpha:latest"]
    assert client.chat("alpha", []).done_reason == "load"


def test_how_long_a_model_stays(client: ollama.Client) -> None:
    client.chat("alpha", [{"role": "user", "content": "COUNT"}], keep_alive="10m")

    def expires_in() -> timedelta:
        [model] = client.ps().models
        assert model.expires_at is not None
        return model.expires_at - datetime.now(UTC)

    eventually(lambda: expires_in() < timedelta(days=1))
    assert timedelta(minutes=9) < expires_in() <= timedelta(minutes=10)
    client.generate("alpha", "COUNT")  # which says nothing about it
    eventually(lambda: expires_in() < timedelta(days=1))
    client.generate("alpha", "COUNT", keep_alive=-1)
    assert expires_in() > timedelta(days=10_000)
    client.generate("alpha", "COUNT", keep_alive="0s")
    eventually(lambda: names_up(client) == [])
    assert client.generate("alpha", keep_alive=0).done_reason == "unload"  # which it is
    assert names_up(client) == []


# --- what this API does not do ------------------------------------------------------------------------------------


def test_models_are_not_changed(client: ollama.Client) -> None:
    asks: list[Callable[[], object]] = [
        lambda: client.pull("llama3.2"),
        lambda: client.push("alpha"),
        lambda: client.create("x", from_="alpha"),
        lambda: client.copy("alpha", "x"),
        lambda: client.delete("alpha"),
    ]
    for ask in asks:
        with pytest.raises(ollama.ResponseError, match="/v1/download") as error:
            ask()
        assert error.value.status_code == 400


def test_what_clients_look_for_to_find_a_server(server: RunningServer) -> None:
    for client in (server.http, server.anonymous):
        assert client.get("/").text == "Ollama is running"
        assert client.head("/").status_code == 200
        version = client.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # which VS Code wants
