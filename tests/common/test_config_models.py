"""The settings' limits, on the model's section and on the load request alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from common.config_models import (
    DraftModelConfig,
    LoadSettings,
    ModelConfig,
    ModelParameters,
    NetworkConfig,
    Settings,
)
from common.settings_catalog import ALL_SETTINGS, CATALOG, did_you_mean
from common.tabby_config import merge_load_settings
from endpoints.core.types.model import DraftModelLoadRequest, ModelLoadRequest

INTERVALS = ["recurrent_checkpoint_interval", "recurrent_checkpoint_interval_pp"]


def model_config(**values: Any) -> ModelConfig:
    return ModelConfig(**values)


def load_request(**values: Any) -> ModelLoadRequest:
    return ModelLoadRequest(model_name="m", **values)


both = pytest.mark.parametrize("make", [model_config, load_request])


@both
@pytest.mark.parametrize("key", INTERVALS)
class TestCheckpointIntervals:
    @pytest.mark.parametrize(("given", "read"), [(256, 256), (1024, 1024), (2048, 2048), ("2048", 2048), (None, None)])
    def test_accepted(self, make: Any, key: str, given: object, read: object) -> None:
        assert getattr(make(**{key: given}), key) == read

    @pytest.mark.parametrize("given", [1000, 0, -256, 1.5, True, False, "x", "1000", [1024]])
    def test_refused(self, make: Any, key: str, given: object) -> None:
        with pytest.raises(ValidationError) as raised:
            make(**{key: given})
        assert raised.value.errors()[0]["loc"] == (key,)

    def test_unset_by_default(self, make: Any, key: str) -> None:
        assert getattr(make(), key) is None


@both
class TestCheckpointTarget:
    @pytest.mark.parametrize(
        ("given", "read"), [(256, 256), (" 2048 ", 2048), ("3s", "3s"), (" 0.5 s", "0.5s"), (10**30, 10**30)]
    )
    def test_accepted(self, make: Any, given: object, read: object) -> None:
        assert make(recurrent_checkpoint_target=given).recurrent_checkpoint_target == read

    # The last one is infinite as a float.
    @pytest.mark.parametrize("given", [255, "0", "0s", "-3s", "3", "1e9s", "s", 3.0, True, "\u00b2", "9" * 400 + "s"])
    def test_refused(self, make: Any, given: object) -> None:
        with pytest.raises(ValidationError) as raised:
            make(recurrent_checkpoint_target=given)
        assert raised.value.errors()[0]["loc"] == ("recurrent_checkpoint_target",)


@both
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache_size", 1000),
        ("cache_size", 0),
        ("chunk_size", 0),
        ("chunk_size", True),
        ("cache_mode", "Q5"),
        ("cache_mode", "9,4"),
        ("max_seq_len", -2),
        ("max_batch_size", 0),
        ("gpu_split", [-1]),
        ("gpu_split", [float("inf")]),
        ("gpu_split", [True]),
        ("backend", "exllamav2"),
        ("tensor_parallel_backend", "mpi"),
        ("template_vars_force", "no mapping"),
        ("template_vars_force", "{broken"),
    ],
)
def test_other_limits_hold_on_both(make: Any, key: str, value: object) -> None:
    with pytest.raises(ValidationError):
        make(**{key: value})


@both
@pytest.mark.parametrize(("given", "read"), [("fp16", "FP16"), ("Q8", "Q8"), ("8 , 4", "8,4"), ("2,8", "2,8")])
def test_cache_mode_is_normalised(make: Any, given: str, read: str) -> None:
    assert make(cache_mode=given).cache_mode == read


@pytest.mark.parametrize("model", [DraftModelConfig, DraftModelLoadRequest])
def test_draft_takes_pairs_and_automatic_alpha(model: type[DraftModelConfig]) -> None:
    draft = model(draft_cache_mode="8,4", draft_rope_alpha="auto")
    assert (draft.draft_cache_mode, draft.draft_rope_alpha) == ("8,4", "auto")


def test_load_request_offers_every_model_parameter() -> None:
    assert set(ModelParameters.model_fields) < set(ModelLoadRequest.model_fields)
    assert {"model_name", "skip_queue", "draft_model"} < set(ModelLoadRequest.model_fields)


def test_load_request_gives_only_what_was_sent() -> None:
    request = load_request(cache_mode=None, chunk_size=2048, draft_model={"draft_model_name": "d", "draft_mode": None})
    assert request.parameters() == {"chunk_size": 2048, "draft_model": {"draft_model_name": "d"}}


def test_load_request_needs_a_name() -> None:
    with pytest.raises(ValidationError):
        ModelLoadRequest(chunk_size=1024)  # type: ignore[call-arg]  # what is tested


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_null_is_the_default(setting: Any) -> None:
    settings = Settings.model_validate({setting.section: {setting.key: None}})
    assert settings == Settings()
    assert setting.key not in getattr(settings, setting.section).model_fields_set


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_described(setting: Any) -> None:
    assert setting.description.endswith((".", "]."))
    assert setting.allowed
    assert not setting.is_ignored(setting.default)


def test_option_names_are_unique() -> None:
    options = [setting.option for setting in ALL_SETTINGS]
    assert len(options) == len(set(options))


def test_sections_stand_in_the_usual_order() -> None:
    assert list(CATALOG) == [
        "network",
        "logging",
        "model",
        "draft_model",
        "lora",
        "embeddings",
        "sampling",
        "memory",
        "developer",
    ]
    assert next(iter(CATALOG["model"])) == "model_dir"


@pytest.mark.parametrize(
    ("given", "read"), [(["OAI"], ["oai"]), ("OAI, Kobold, ollama", ["oai", "kobold", "ollama"]), ([], ["oai"])]
)
def test_api_servers(given: Any, read: list[str]) -> None:
    assert NetworkConfig(api_servers=given).api_servers == read


@pytest.mark.parametrize("given", [["*"], ["loopback", "https://chat.example.com"], ["http://[::1]:8000"], []])
def test_cors_origins_accepted(given: list[str]) -> None:
    assert NetworkConfig(cors_origins=given).cors_origins == given


@pytest.mark.parametrize("given", [["example.com"], ["https://example.com/"], ["*", "loopback"], ["file://x"]])
def test_cors_origins_refused(given: list[str]) -> None:
    with pytest.raises(ValidationError):
        NetworkConfig(cors_origins=given)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["llm.example.com", "NAS.local."], ["llm.example.com", "nas.local"]),
        ("127.0.0.1, [::1], fe80::1", ["127.0.0.1", "::1", "fe80::1"]),
        ([], []),
    ],
)
def test_hosts_accepted(given: object, read: list[str]) -> None:
    settings = NetworkConfig.model_validate({"allowed_hosts": given, "fetch_allowed_hosts": given})
    assert (settings.allowed_hosts, settings.fetch_allowed_hosts) == (read, read)


@pytest.mark.parametrize("given", ["nas.local:8080", "http://nas.local", "10.0.0.0/8", "*.local", "", "a b", "me@nas"])
def test_hosts_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="is not a host name or an IP address without a port"):
        NetworkConfig(allowed_hosts=[given])


@pytest.mark.parametrize(("given", "read"), [(False, "off"), (True, "on"), ("auto", "auto"), ("off", "off")])
def test_reasoning_mode_as_yaml_writes_it(given: Any, read: str) -> None:
    assert ModelConfig(reasoning_mode=given).reasoning_mode == read


def test_reasoning_false_is_unset() -> None:
    assert ModelConfig(reasoning=False) == ModelConfig()
    assert ModelConfig(reasoning=True).reasoning is True


ANSWERS = {
    "reasoning_mode": "on",
    "reasoning": True,
    "reasoning_start_token": "[THINK]",
    "reasoning_end_token": "[/THINK]",
    "start_in_reasoning": "never",
    "tool_calls_in_reasoning": False,
    "reasoning_budget_tokens": 100,
    "reasoning_budget_message": "Enough.",
    "tool_format": "hermes",
    "exclude_tools_when_tool_choice_none": True,
    "harmony": False,
    "muse_glimmer": False,
}


def test_settings_of_answers_are_taken_wherever_a_model_is_loaded(tmp_path: Path, log_lines: list[str]) -> None:
    (tmp_path / "tabby_config.yml").write_text(json.dumps({"model": ANSWERS}), encoding="utf-8")
    from_file = merge_load_settings(Settings(), model_directory=tmp_path).model
    (tmp_path / "tabby_config.yml").unlink()
    body = load_request(**ANSWERS).parameters()
    from_request = merge_load_settings(Settings(), model_directory=tmp_path, request=body).model
    for model in (ModelConfig.model_validate(ANSWERS), from_file, from_request):
        assert {name: getattr(model, name) for name in ANSWERS} == ANSWERS
    assert not any(CATALOG["model"][name].is_ignored(value) for name, value in ANSWERS.items())
    assert log_lines == []


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "auto"),
        ({"reasoning": False}, "auto"),
        ({"reasoning": True}, "on"),
        ({"reasoning": True, "reasoning_mode": "off"}, "off"),
        ({"reasoning": False, "reasoning_mode": "on"}, "on"),
    ],
)
def test_reasoning_is_the_mode_on(settings: dict[str, Any], mode: str) -> None:
    assert ModelConfig(**settings).effective_reasoning_mode == mode


def test_reasoning_tags_at_their_defaults_are_not_chosen() -> None:
    assert ModelConfig(reasoning_start_token="<think>", reasoning_end_token="</think>").chosen_reasoning_tags is None
    assert ModelConfig(reasoning_start_token="<a>").chosen_reasoning_tags == ("<a>", "</think>")


def test_deprecated_thinking_flag_yields_to_the_variable() -> None:
    assert ModelConfig(force_enable_thinking=True).forced_template_variables() == {"enable_thinking": True}
    explicit = ModelConfig(force_enable_thinking=True, template_vars_force={"enable_thinking": False})
    assert explicit.forced_template_variables() == {"enable_thinking": False}
    assert ModelConfig().forced_template_variables() == {}


def test_load_settings_survive_the_way_to_the_engine() -> None:
    settings = LoadSettings(model=ModelConfig(cache_mode="8,4", gpu_split=[20, 24], reasoning_mode="off"))
    assert LoadSettings.model_validate_json(settings.model_dump_json()) == settings


def test_values_do_not_change() -> None:
    model: BaseModel = ModelConfig()
    with pytest.raises(ValidationError):
        model.chunk_size = 1  # type: ignore[attr-defined]  # what is tested


def test_unknown_keys_of_a_load_request_are_warned_about(log_lines: list[str]) -> None:
    load_request(max_seq_lenn=4096, draft_model={"draft_tokens": 3})
    assert any("max_seq_lenn" in line and "Did you mean max_seq_len?" in line for line in log_lines)
    assert any("draft_model.draft_tokens" in line for line in log_lines)
    assert len(log_lines) == 2


def test_nothing_is_suggested_for_a_word_that_is_far_from_all() -> None:
    assert did_you_mean("zzz", CATALOG["model"]) == ""
