"""Where settings come from, what wins, and what is said about what does not fit."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from common.args import parse_arguments
from common.config_models import Settings
from common.errors import InvalidRequest, SettingsError
from common.settings_catalog import ALL_SETTINGS, CATALOG, Setting
from common.tabby_config import (
    LoadedSettings,
    generate_config_file,
    load_settings,
    merge_load_settings,
    migrate,
    render_config,
)

Read = Callable[..., LoadedSettings]

# TabbyAPI's keys with TabbyAPI's defaults, as its `export-config` writes them.
EVERY_KEY_OF_TABBY = """\
network:
  host: 127.0.0.1
  port: 5000
  disable_auth: false
  disable_fetch_requests: false
  send_tracebacks: false
  api_servers: ["OAI"]
  sse_ping_interval: 15
logging:
  log_prompt: false
  log_generation_params: false
  log_requests: false
  log_chat_completion_requests: false
model:
  model_dir: models
  inline_model_loading: false
  use_dummy_models: false
  dummy_model_names: ["gpt-3.5-turbo"]
  model_name:
  use_as_default: []
  backend:
  max_seq_len:
  cache_size:
  cache_mode: FP16
  tensor_parallel: false
  tensor_parallel_backend: native
  gpu_split_auto: true
  autosplit_reserve: [96]
  gpu_split: []
  cpu_moe_offload_layers: 0
  rope_scale: 1.0
  rope_alpha:
  chunk_size: 2048
  output_chunking: true
  max_batch_size:
  prompt_template:
  vision: false
  template_vars_default: {}
  template_vars_force: {}
  force_enable_thinking: false
  reasoning: false
  reasoning_start_token: <think>
  reasoning_end_token: </think>
  start_in_reasoning: auto
  tool_calls_in_reasoning: true
  reasoning_budget_tokens:
  reasoning_budget_message:
  tool_format:
  harmony:
  muse_glimmer:
draft_model:
  draft_mode: model
  draft_model_dir: models
  draft_model_name:
  draft_rope_scale: 1.0
  draft_rope_alpha:
  draft_cache_mode: FP16
  draft_gpu_split: []
  draft_num_tokens:
  dynamic_draft: false
  ngram_match_min: 2
lora:
  lora_dir: loras
  loras:
embeddings:
  embedding_model_dir: models
  embeddings_device: cpu
  embedding_model_name:
sampling:
  override_preset:
memory:
  sysmem_recurrent_cache: 4096
  sysmem_kv_cache: 0
  cuda_malloc_async: true
developer:
  unsafe_launch: false
  disable_request_streaming: false
  realtime_process_priority: false
  seqlog: false
  seqlog_server_url: http://localhost:5341
  seqlog_api_key:
"""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Settings of a folder with the given config.yml, without this process's environment."""

    def read_settings(config: str | None = None, environ: dict[str, str] | None = None, **more: Any) -> LoadedSettings:
        if config is not None:
            (tmp_path / "config.yml").write_text(config, encoding="utf-8")
        return load_settings(environ=environ or {}, directory=tmp_path, **more)

    return read_settings


def other_value(setting: Setting) -> Any:
    """An allowed value that is not the default."""
    special = {
        "network.api_servers": ["kobold", "oai"],
        "network.cors_origins": ["https://a.example", "loopback"],
        "model.cache_mode": "8,4",
        "draft_model.draft_cache_mode": "Q6",
        "model.rope_alpha": "auto",
        "draft_model.draft_rope_alpha": 2.5,
        "draft_model.draft_confidence": 0.5,
        "model.recurrent_checkpoint_target": 1024,
        "lora.loras": [{"name": "a", "scaling": 0.5}, {"name": "b", "scaling": 2.0}],
        "model.backend": "exllamav3",
        "model.aliases": {"gpt-4o": "my-model", "a/b": "c"},
    }
    if setting.name in special:
        return special[setting.name]
    if setting.collection == "mapping":
        return {"a": 1, "b": [True]}
    if setting.collection == "list":
        return [20.0, 24.5] if "a number" in setting.allowed else ["a", "b"]
    if setting.allowed == "true or false":
        return not setting.default
    if setting.allowed.startswith("one of "):
        options = setting.allowed.removeprefix("one of ").split(", ")
        return next(option for option in options if option != setting.default)
    if setting.allowed.startswith("an integer"):
        return 512
    return 1.5 if setting.allowed.startswith("a number") else "some text"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def value_of(loaded: LoadedSettings, setting: Setting) -> Any:
    return getattr(loaded.settings, setting.section).model_dump()[setting.key]


# --- each key from each place -------------------------------------------------------------------------------------

every_setting = pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)


@every_setting
def test_set_in_config_yml(read: Read, setting: Setting) -> None:
    value = other_value(setting)
    loaded = read(f"{setting.section}:\n  {setting.key}: {as_text(value)}\n")
    assert value_of(loaded, setting) == value
    assert loaded.sources[setting.name] == "config.yml"


@every_setting
def test_set_in_the_environment(read: Read, setting: Setting) -> None:
    value = other_value(setting)
    loaded = read(environ={setting.variable: as_text(value)})
    assert value_of(loaded, setting) == value
    assert loaded.sources[setting.name] == f"environment {setting.variable}"


@every_setting
def test_set_on_the_command_line(read: Read, setting: Setting) -> None:
    value = other_value(setting)
    texts = [as_text(item) for item in value] if setting.collection == "list" else [as_text(value)]
    loaded = read(options=parse_arguments([setting.option, *texts]).options)
    assert value_of(loaded, setting) == value
    assert loaded.sources[setting.name] == setting.option


def test_empty_variables_are_unset(read: Read) -> None:
    loaded = read(environ={"TABBY_LOG_LEVEL": ""} | {setting.variable: "" for setting in ALL_SETTINGS})
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}


@pytest.mark.parametrize("text", ["[20,24]", "20,24", "[20, 24]", " 20 , 24 "])
def test_list_in_the_environment(read: Read, text: str) -> None:
    assert read(environ={"TABBY_MODEL_GPU_SPLIT": text}).settings.model.gpu_split == [20.0, 24.0]


def test_mapping_in_the_environment(read: Read) -> None:
    environ = {"TABBY_MODEL_TEMPLATE_VARS_FORCE": "{enable_thinking: true}"}
    assert read(environ=environ).settings.model.template_vars_force == {"enable_thinking": True}


def test_log_level_by_its_short_name(read: Read) -> None:
    short = {"TABBY_LOG_LEVEL": "debug"}
    assert read(environ=short).settings.logging.log_level == "DEBUG"
    assert read(environ=short).sources["logging.log_level"] == "environment TABBY_LOG_LEVEL"
    both = {"TABBY_LOGGING_LOG_LEVEL": "ERROR", **short}
    assert read(environ=both).settings.logging.log_level == "ERROR"


# --- precedence ---------------------------------------------------------------------------------------------------


def test_later_places_win(read: Read, tmp_path: Path) -> None:
    config = (
        "network: {host: file, port: 1}\nmodel: {chunk_size: 256, cache_size: 256, max_seq_len: 1, model_name: file}"
    )
    environ = {"TABBY_MODEL_CHUNK_SIZE": "512", "TABBY_MODEL_CACHE_SIZE": "512", "TABBY_MODEL_MAX_SEQ_LEN": "2"}
    (tmp_path / "other.yml").write_text("model: {cache_size: 768, max_seq_len: 3}")
    loaded = read(config, environ, config_file="other.yml", options={"model": {"max_seq_len": "4"}})
    model = loaded.settings.model
    assert (model.model_name, model.chunk_size, model.cache_size, model.max_seq_len) == ("file", 512, 768, 4)
    assert (loaded.settings.network.host, loaded.settings.network.port) == ("file", 1)
    assert {
        key: loaded.sources[f"model.{key}"] for key in ("model_name", "chunk_size", "cache_size", "max_seq_len")
    } == {
        "model_name": "config.yml",
        "chunk_size": "environment TABBY_MODEL_CHUNK_SIZE",
        "cache_size": "other.yml",
        "max_seq_len": "--max-seq-len",
    }
    assert loaded.sources["model.vision"] == "default"
    assert loaded.command_line == {"model": {"max_seq_len": 4}}


def test_null_leaves_the_earlier_place_in_force(read: Read, tmp_path: Path) -> None:
    (tmp_path / "other.yml").write_text("model:\n  cache_size:\nnetwork:\n")
    assert read("model: {cache_size: 512}", config_file="other.yml").settings.model.cache_size == 512


def test_mappings_are_combined_and_lists_replaced(read: Read) -> None:
    loaded = read(
        "model: {template_vars_force: {a: 1, b: 1}, gpu_split: [1, 2]}",
        {"TABBY_MODEL_TEMPLATE_VARS_FORCE": '{"b": 2}', "TABBY_MODEL_GPU_SPLIT": "3"},
    )
    assert loaded.settings.model.template_vars_force == {"a": 1, "b": 2}
    assert loaded.settings.model.gpu_split == [3.0]


# --- files that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "", "# nothing\n", "model:\n", "\ufeff", "---\n"])
def test_missing_and_empty_files_are_fine(read: Read, text: str | None) -> None:
    loaded = read(text)
    assert (loaded.settings, loaded.warnings) == (Settings(), [])


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("network:\n\thost: a\n", 2, "tab"),
        ("network:\n  port: 1\n  port: 2\n", 3, "duplicate"),
        ("network:\n  port: 1\n host: a\n", 3, "indentation"),
        ("model:\n  gpu_split: [1, 2\nnetwork:\n", 3, "brackets"),
        ("model:\n  model_name: *anchor\n", 2, "alias"),
    ],
)
def test_broken_file_stops_the_start_with_its_line(read: Read, text: str, line: int, word: str) -> None:
    with pytest.raises(SettingsError, match=rf"config\.yml, line {line}: .*{word}"):
        read(text)


@pytest.mark.parametrize("text", ["- a\n", "just text\n", "network: [1]\n", "network: text\n", "model: \x01\n"])
def test_file_of_another_shape_stops_the_start(read: Read, text: str) -> None:
    with pytest.raises(SettingsError, match=r"config\.yml"):
        read(text)


def test_endless_nesting_stops_the_start(read: Read) -> None:
    with pytest.raises(SettingsError, match="nested too deeply"):
        read("x: " + "[" * 1000)


def test_file_in_another_encoding_stops_the_start(read: Read, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_bytes("model: {model_name: ü}".encode("latin-1"))
    with pytest.raises(SettingsError, match="UTF-8"):
        read()


def test_missing_file_of_the_config_option_stops_the_start(read: Read) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yml given by --config does not exist"):
        read(config_file="absent.yml")


def test_unknown_keys_are_warned_about_with_the_nearest(read: Read) -> None:
    loaded = read(
        "model: {max_seq_lenn: 4096}\nnetwrk: {port: 1}\n", {"TABBY_MODEL_CACH_SIZE": "1", "TABBY_OTHER": "1"}
    )
    assert loaded.settings == Settings()
    assert len(loaded.warnings) == 3
    assert "model.max_seq_lenn in config.yml is ignored. Did you mean max_seq_len?" in loaded.warnings[0]
    assert "section netwrk in config.yml is ignored. Did you mean network?" in loaded.warnings[1]
    assert "TABBY_MODEL_CACH_SIZE" in loaded.warnings[2]
    assert "Did you mean TABBY_MODEL_CACHE_SIZE?" in loaded.warnings[2]


def test_refused_values_are_all_named_with_source_and_remedy(read: Read) -> None:
    with pytest.raises(SettingsError) as raised:
        read(
            "model: {chunk_size: soon, cache_mode: Q5}",
            {"TABBY_NETWORK_PORT": "99999"},
            options={"memory": {"sysmem_kv_cache": "-1"}},
        )
    message = str(raised.value)
    assert "config.yml: model.chunk_size is 'soon', but must be an integer, greater than 0." in message
    assert "config.yml: model.cache_mode is 'Q5', but must be FP16, Q8, Q6, Q4, or" in message
    assert "environment TABBY_NETWORK_PORT: network.port is '99999', but must be" in message
    assert "--sysmem-kv-cache: memory.sysmem_kv_cache is '-1', but must be an integer, 0 or more." in message
    assert "pydantic" not in message


@pytest.mark.parametrize("key", ["recurrent_checkpoint_interval", "recurrent_checkpoint_interval_pp"])
@pytest.mark.parametrize("value", ["1000", "0", "-256", "1.5", "true", "x"])
def test_refused_intervals_stop_the_start(read: Read, key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"model.{key} is .* must be an integer, greater than 0, a multiple of 256"):
        read(f"model: {{{key}: {value}}}")


# --- what is understood without effect ----------------------------------------------------------------------------


def test_every_key_of_tabby_at_its_default_starts_without_noise(read: Read) -> None:
    loaded = read(EVERY_KEY_OF_TABBY)
    # By default there are more front ends here.
    assert loaded.settings == Settings.model_validate({"network": {"api_servers": ["oai"]}})
    assert loaded.settings.model.reasoning_mode == "auto"
    assert [warning for warning in loaded.warnings if "model.reasoning: false" not in warning] == []
    assert len(loaded.warnings) == 1


def test_the_list_above_is_complete(read: Read) -> None:
    ours = {
        "aliases",
        "allowed_hosts",
        "body_timeout",
        "control_tokens_in_messages",
        "cors_origins",
        "disk_cache_checkpoint_interval",
        "disk_cache_dir",
        "disk_cache_flush_on_idle",
        "disk_cache_size",
        "disk_cache_write_interval",
        "draft_confidence",
        "draft_max_rows",
        "embeddings_batch_tokens",
        "embeddings_truncate",
        "engine_timeout",
        "exclude_tools_when_tool_choice_none",
        "fetch_allowed_hosts",
        "hybrid_draft_tokens",
        "idle_timeout",
        "image_dir",
        "keep_volatile_lines",
        "log_level",
        "log_console",
        "log_file",
        "log_json",
        "max_body_mb",
        "max_models",
        "max_queue",
        "max_queue_per_key",
        "memory_budget",
        "ngram_corpus",
        "prefill_cooldown",
        "public_docs",
        "public_metrics",
        "queue_timeout",
        "reasoning_mode",
        "recurrent_checkpoint_boundaries",
        "recurrent_checkpoint_interval",
        "recurrent_checkpoint_interval_pp",
        "recurrent_checkpoint_target",
        "recurrent_dtype",
        "response_store_mb",
        "sampler_preset",
        "shared_chunk_size",
        "shutdown_timeout",
        "sparse_draft_head",
        "ssl_certfile",
        "ssl_keyfile",
        "stream_timeout",
        "sysmem_image_cache",
    }
    written = YAML(typ="safe", pure=True).load(EVERY_KEY_OF_TABBY)
    assert {setting.key for setting in ALL_SETTINGS} - ours == {key for keys in written.values() for key in keys}


def test_one_line_for_each_setting_without_effect(read: Read) -> None:
    loaded = read("model: {rope_scale: 2}\nnetwork: {send_tracebacks: true}", {"TABBY_LORA_LORAS": ""})
    assert [warning.split(" has no effect: ")[0] for warning in loaded.warnings] == [
        "network.send_tracebacks (config.yml)",
        "model.rope_scale (config.yml)",
    ]


def test_turning_reasoning_off_needs_the_mode(read: Read) -> None:
    assert read("model: {reasoning: false}").settings.model.reasoning_mode == "auto"
    assert read("model: {reasoning_mode: off}").settings.model.reasoning_mode == "off"


def test_unknown_name_in_use_as_default_is_warned_about(read: Read) -> None:
    loaded = read("model: {use_as_default: [cache_mod, model_dir, draft_mode]}")
    assert len(loaded.warnings) == 2
    assert "names cache_mod, which is no setting of a model. Did you mean cache_mode?" in loaded.warnings[0]
    assert "names model_dir" in loaded.warnings[1]


# --- old layouts --------------------------------------------------------------------------------------------------

OLD_LAYOUT = """\
# my file
logging:
  prompt: true
  log_requests: true
  requests: false
model:
  model_name: m
  draft:
    draft_model_name: d
  lora:
    loras:
      - name: a
        scaling: 0.5
"""


def test_old_layout_is_rewritten_and_kept(read: Read, tmp_path: Path) -> None:
    loaded = read(OLD_LAYOUT)
    settings = loaded.settings
    assert (settings.logging.log_prompt, settings.logging.log_requests) == (True, True)
    assert settings.draft_model.draft_model_name == "d"
    assert [(lora.name, lora.scaling) for lora in settings.lora.loras] == [("a", 0.5)]
    assert (tmp_path / "config.yml.bak").read_text() == OLD_LAYOUT
    assert any("was rewritten; the old file is config.yml.bak" in warning for warning in loaded.warnings)
    again = read()
    assert again.settings == settings
    assert not any("rewritten" in warning for warning in again.warnings)


def test_earlier_backup_is_not_overwritten(read: Read, tmp_path: Path) -> None:
    (tmp_path / "config.yml.bak").write_text("precious")
    read(OLD_LAYOUT)
    assert (tmp_path / "config.yml.bak").read_text() == "precious"
    assert (tmp_path / "config.yml.bak.1").read_text() == OLD_LAYOUT


def test_environment_does_not_get_into_the_rewritten_file(read: Read, tmp_path: Path) -> None:
    read(OLD_LAYOUT, {"TABBY_DEVELOPER_SEQLOG_API_KEY": "secret"}, options={"network": {"port": "6000"}})
    text = (tmp_path / "config.yml").read_text()
    assert "secret" not in text
    assert "6000" not in text


def test_failure_to_rewrite_keeps_file_and_values(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    loaded = read(OLD_LAYOUT)
    assert loaded.settings.draft_model.draft_model_name == "d"
    assert any("could not be rewritten (Read-only file system)" in warning for warning in loaded.warnings)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]
    assert (tmp_path / "config.yml").read_text() == OLD_LAYOUT


def test_old_layout_with_a_mistake_is_not_rewritten(read: Read, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.chunk_size"):
        read(OLD_LAYOUT + "  chunk_size: x\n")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]


def test_file_of_the_config_option_is_migrated_too(read: Read, tmp_path: Path) -> None:
    (tmp_path / "other.yml").write_text(OLD_LAYOUT)
    assert read(config_file="other.yml").settings.model.model_name == "m"
    assert (tmp_path / "other.yml.bak").read_text() == OLD_LAYOUT


@pytest.mark.skipif(sys.platform == "win32", reason="no file modes")
def test_rewritten_file_keeps_its_mode(read: Read, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(OLD_LAYOUT)
    (tmp_path / "config.yml").chmod(0o640)
    read()
    assert stat.S_IMODE((tmp_path / "config.yml").stat().st_mode) == 0o640


def test_present_layout_wins_over_the_old_one() -> None:
    old = {"model": {"draft": {"draft_mode": "mtp", "draft_num_tokens": 3}}, "draft_model": {"draft_mode": "ngram"}}
    assert migrate(old) == {"model": {}, "draft_model": {"draft_mode": "ngram", "draft_num_tokens": 3}}


def test_unknown_logging_key_is_no_old_layout() -> None:
    assert migrate({"logging": {"lgo_prompt": True}}) == {"logging": {"lgo_prompt": True}}


@pytest.mark.parametrize("content", [{"model": None}, {"model": {"draft": None}}, {"logging": []}, {"model": "x"}, {}])
def test_migration_survives_odd_shapes(content: dict[str, Any]) -> None:
    assert set(migrate(content)) >= set(content)


# --- one load -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "my-model").mkdir()
    return tmp_path / "my-model"


SERVER = Settings.model_validate(
    {
        "model": {
            "model_name": "x",
            "cache_mode": "Q8",
            "chunk_size": 1024,
            "recurrent_checkpoint_interval_pp": 2048,
            "use_as_default": ["recurrent_checkpoint_interval_pp", "draft_num_tokens"],
        },
        "draft_model": {"draft_mode": "ngram", "draft_num_tokens": 3, "draft_model_dir": "drafts"},
        "memory": {"sysmem_recurrent_cache": 1},
    }
)


def test_load_at_start_takes_the_sections(model: Path) -> None:
    load = merge_load_settings(SERVER, model_directory=model)
    assert (load.model.cache_mode, load.model.chunk_size, load.model.recurrent_checkpoint_interval_pp) == (
        "Q8",
        1024,
        2048,
    )
    assert load.draft_model.draft_mode == "ngram"
    assert load.memory == SERVER.memory


def test_load_by_request_takes_defaults_and_use_as_default(model: Path) -> None:
    load = merge_load_settings(SERVER, model_directory=model, request={})
    assert load.model.recurrent_checkpoint_interval_pp == 2048
    assert (load.model.cache_mode, load.model.chunk_size) == ("FP16", 2048)
    assert (load.draft_model.draft_mode, load.draft_model.draft_num_tokens) == ("model", 3)
    assert load.memory == SERVER.memory


def test_what_is_no_load_parameter_makes_no_difference(model: Path) -> None:
    renamed = SERVER.model_copy(
        update={"model": SERVER.model.model_copy(update={"model_name": "y", "use_as_default": []})}
    )
    assert merge_load_settings(SERVER, model_directory=model) == merge_load_settings(renamed, model_directory=model)


def test_folder_of_draft_models_is_the_servers(model: Path) -> None:
    request = {"draft_model": {"draft_model_name": "d", "draft_model_dir": "/elsewhere"}}
    load = merge_load_settings(SERVER, model_directory=model, request=request)
    assert load.draft_model.draft_model_dir == str(Path("drafts").absolute())


def test_models_own_file_comes_between(model: Path) -> None:
    (model / "tabby_config.yml").write_text(
        "model: {chunk_size: 512, cache_mode: Q4, recurrent_checkpoint_interval_pp: 512}\n"
        "draft_model: {draft_mode: mtp}\n"
    )
    at_start = merge_load_settings(SERVER, model_directory=model, command_line={"model": {"cache_mode": "Q6"}})
    assert (at_start.model.chunk_size, at_start.model.cache_mode, at_start.draft_model.draft_mode) == (512, "Q6", "mtp")
    request = {"chunk_size": 256, "cache_mode": None, "draft_model": {"draft_mode": "disabled"}}
    requested = merge_load_settings(SERVER, model_directory=model, request=request)
    assert (requested.model.chunk_size, requested.model.cache_mode) == (256, "Q4")
    assert requested.model.recurrent_checkpoint_interval_pp == 512
    assert (requested.draft_model.draft_mode, requested.draft_model.draft_num_tokens) == ("disabled", 3)


def test_adapters_are_for_the_model_at_start_or_named_with_the_model(model: Path) -> None:
    server = Settings.model_validate({"lora": {"lora_dir": "adapters", "loras": [{"name": "a", "scaling": 0.5}]}})

    def loras(request: dict[str, Any] | None = None, command_line: Any = None) -> list[tuple[str, float]]:
        load = merge_load_settings(server, model_directory=model, request=request, command_line=command_line)
        assert load.lora.lora_dir == str(Path("adapters").absolute())
        return [(lora.name, lora.scaling) for lora in load.lora.loras]

    assert loras() == [("a", 0.5)]
    assert loras(command_line={"lora": {"loras": '[{"name": "d"}]'}}) == [("d", 1.0)]
    assert loras(request={}) == []
    (model / "tabby_config.yml").write_text("lora: {loras: [{name: b, scaling: 2}], lora_dir: elsewhere}")
    assert loras() == loras(request={}) == [("b", 2.0)]
    assert loras(request={"loras": [{"name": "c"}]}) == [("c", 1.0)]
    assert loras(request={"loras": []}) == []
    with pytest.raises(InvalidRequest, match="each name once"):
        loras(request={"loras": [{"name": "c"}, {"name": "c"}]})


def test_draft_settings_inside_the_models_are_read(model: Path) -> None:
    (model / "tabby_config.yml").write_text("model: {draft_model: {draft_mode: mtp}}")
    assert merge_load_settings(Settings(), model_directory=model).draft_model.draft_mode == "mtp"
    (model / "tabby_config.yml").write_text("model: {draft_model: {draft_mode: mtp}}\ndraft_model: {draft_mode: ngram}")
    assert merge_load_settings(Settings(), model_directory=model).draft_model.draft_mode == "ngram"


@pytest.mark.parametrize("request_body", [None, {}])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n\tchunk_size: 1\n", r"my-model/tabby_config\.yml, line 2: a tab"),
        (
            "model: {recurrent_checkpoint_interval: 1000}",
            r"my-model/tabby_config\.yml: model\.recurrent_checkpoint_interval",
        ),
        ("model: [1]", r"my-model/tabby_config\.yml"),
    ],
)
def test_models_own_file_is_checked(model: Path, text: str, message: str, request_body: dict[str, Any] | None) -> None:
    (model / "tabby_config.yml").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        merge_load_settings(SERVER, model_directory=model, request=request_body)


def test_models_own_file_is_warned_about(model: Path, log_lines: list[str]) -> None:
    (model / "tabby_config.yml").write_text(
        "model: {chunk_sise: 1, model_dir: x, rope_scale: 2, reasoning: false}\nmemory: {sysmem_kv_cache: 1}\n"
    )
    merge_load_settings(Settings(), model_directory=model, request={})
    assert any("model.chunk_sise in my-model/tabby_config.yml" in line and "chunk_size?" in line for line in log_lines)
    assert any(line.startswith("model.model_dir in my-model/tabby_config.yml has no effect") for line in log_lines)
    assert any(
        line.startswith("memory.sysmem_kv_cache in my-model/tabby_config.yml has no effect") for line in log_lines
    )
    assert any(line.startswith("model.rope_scale (my-model/tabby_config.yml) has no effect") for line in log_lines)
    assert any("model.reasoning: false" in line for line in log_lines)
    assert len(log_lines) == 5


def test_request_without_effect_is_warned_about(model: Path, log_lines: list[str]) -> None:
    merge_load_settings(Settings(), model_directory=model, request={"rope_scale": 2})
    [line] = log_lines
    assert line.startswith("model.rope_scale (load request) has no effect: ")


def test_refused_request_names_the_key(model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"load request: model\.cache_size is 1000, but must be"):
        merge_load_settings(SERVER, model_directory=model, request={"cache_size": 1000})


def test_paths_are_relative_to_the_working_directory(model: Path) -> None:
    """The engine's process has another one."""
    server = Settings.model_validate(
        {"memory": {"disk_cache_dir": "kept"}, "draft_model": {"draft_model_dir": "drafts", "ngram_corpus": "a/corpus"}}
    )
    load = merge_load_settings(server, model_directory=model)
    assert load.memory.disk_cache_dir == str(Path("kept").absolute())
    assert load.draft_model.draft_model_dir == str(Path("drafts").absolute())
    assert load.draft_model.ngram_corpus == str(Path("a/corpus").absolute())
    assert merge_load_settings(Settings(), model_directory=model).memory.disk_cache_dir is None


def test_a_load_request_names_a_corpus_inside_the_model_directory(model: Path) -> None:
    def corpus(name: str) -> str | None:
        request = {"draft_model": {"draft_mode": "ngram", "ngram_corpus": name}}
        return merge_load_settings(Settings(), model_directory=model, request=request).draft_model.ngram_corpus

    assert corpus("corpora/english.bin") == str(Path("models/corpora/english.bin").absolute())
    for name in ("/etc/passwd", "../api_tokens.yml", "a/../../b", "\\\\host\\share"):
        with pytest.raises(InvalidRequest, match="inside the model directory") as caught:
            corpus(name)
        assert caught.value.param == "draft_model.ngram_corpus"
    everywhere = Settings.model_validate(
        {"draft_model": {"ngram_corpus": "/srv/corpus"}, "model": {"use_as_default": ["ngram_corpus"]}}
    )
    load = merge_load_settings(everywhere, model_directory=model, request={})
    assert load.draft_model.ngram_corpus == str(Path("/srv/corpus").absolute())


# --- the sample ---------------------------------------------------------------------------------------------------


def test_sample_reads_back_as_the_defaults_without_warnings(read: Read, tmp_path: Path) -> None:
    generate_config_file(filename=tmp_path / "config.yml")
    loaded = read()
    assert (loaded.settings, loaded.warnings) == (Settings(), [])


def test_sample_shows_every_key_with_its_description() -> None:
    text = render_config(Settings())
    for setting in ALL_SETTINGS:
        assert f"\n  {setting.key}:" in text
        assert setting.description.split()[0] in text
    assert text.startswith("#")
    assert (
        "\n\n# The model to load at start, and how.\nmodel:\n  # Folder that holds the model folders.\n  model_dir:"
        in text
    )
    assert "  recurrent_checkpoint_interval_pp:\n" in text
    assert '  cors_origins: ["loopback"]\n' in text


@every_setting
def test_any_value_survives_the_written_file(tmp_path: Path, setting: Setting) -> None:
    settings = Settings.model_validate({setting.section: {setting.key: other_value(setting)}})
    generate_config_file(settings, tmp_path / "config.yml")
    assert load_settings(environ={}, directory=tmp_path).settings == settings


@pytest.mark.parametrize(
    "name",
    ["yes", "1", "a: b", "a #b", "- x", "", " led", "null", "*x", '"q"', "two\nlines", "é", "a,b", "[x]", "~", "2e3"],
)
def test_any_text_survives_the_written_file(tmp_path: Path, name: str) -> None:
    settings = Settings.model_validate({"model": {"model_name": name, "dummy_model_names": [name, name]}})
    generate_config_file(settings, tmp_path / "config.yml")
    assert load_settings(environ={}, directory=tmp_path).settings == settings


def test_catalog_covers_the_models() -> None:
    assert [(setting.section, setting.key) for setting in ALL_SETTINGS] == [
        (section, key) for section, settings in CATALOG.items() for key in settings
    ]
    assert set(CATALOG) == set(Settings.model_fields)
