"""The command line. That every setting is an option with the right effect is tested in test_tabby_config.py."""

from __future__ import annotations

import pytest

from common.args import Arguments, PlanArguments, build_parser, parse_arguments
from common.download_messages import DownloadRequest
from common.settings_catalog import ALL_SETTINGS, CATALOG


def test_nothing_given_serves() -> None:
    assert parse_arguments([]) == Arguments("serve")


def test_values_are_texts_by_section_and_key() -> None:
    arguments = parse_arguments(
        ["--model-dir", "D", "--port=5001", "--disable-auth", "true", "--gpu-split", "20", "24", "--config", "my.yml"]
    )
    assert arguments.options == {
        "network": {"port": "5001", "disable_auth": "true"},
        "model": {"model_dir": "D", "gpu_split": ["20", "24"]},
    }
    assert arguments.config_file == "my.yml"


@pytest.mark.parametrize("option", ["--model-name", "--gpu-split"])
def test_empty_value_is_unset(option: str) -> None:
    assert parse_arguments([option, ""]).options == {}


def test_export_config() -> None:
    assert parse_arguments(["export-config"]).export_path == "config_sample.yml"
    arguments = parse_arguments(["--port", "1", "export-config", "--export-path", "x.yml"])
    assert (arguments.command, arguments.export_path) == ("export-config", "x.yml")
    assert arguments.options == {"network": {"port": "1"}}


def test_export_openapi() -> None:
    assert parse_arguments(["export-openapi"]) == Arguments("export-openapi", export_path="openapi.json")
    arguments = parse_arguments(
        ["--api-servers", "OAI", "--port", "1", "export-openapi", "--api-servers", "oai", "kobold"]
    )
    assert arguments.options["network"] == {"api_servers": ["oai", "kobold"], "port": "1"}


def test_plan_takes_settings_before_and_after_it() -> None:
    arguments = parse_arguments(
        [
            *("--port=1", "--chunk-size", "512", "--gpu-split", "1", "2", "--config", "a.yml", "plan"),
            *("--prompt-tokens", "5266", "--chunk-size", "1024", "--recurrent-checkpoint-target", "3s"),
            *("--boundaries", "512,3800"),
        ]
    )
    assert arguments.command == "plan"
    assert arguments.plan == PlanArguments(prompt_tokens=5266, boundaries=(512, 3800))
    assert arguments.config_file == "a.yml"
    assert arguments.options == {
        "network": {"port": "1"},
        "model": {"chunk_size": "1024", "recurrent_checkpoint_target": "3s", "gpu_split": ["1", "2"]},
    }
    arguments = parse_arguments(
        ["plan", "--model", "m", "--prompt-tokens=5", "--config", "b.yml", "--plot", "p.png", "--json"]
    )
    assert arguments.plan == PlanArguments(prompt_tokens=5, model="m", plot="p.png", as_json=True)
    assert arguments.config_file == "b.yml"
    assert parse_arguments([]).plan is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "required: --prompt-tokens"),
        (["plan", "--prompt-tokens", "many"], "invalid int value: 'many'"),
        (["plan", "--prompt-tokens", "5", "--boundaries", "1,b"], "'1,b' is not a list of numbers such as 512,3800"),
        (["plan", "--prompt-token", "5"], "Unknown option --prompt-token. Did you mean --prompt-tokens?"),
        (["--model", "m"], "Unknown option --model. Did you mean --model-"),
    ],
)
def test_plan_says_what_it_cannot_read(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--max-seq-lem", "4096"], ["--max-seq-lem=4096"], ["--port", "1", "--max-seq-lem"]])
def test_unknown_option_names_the_nearest(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(argv)
    assert raised.value.code == 2
    assert "Unknown option --max-seq-lem. Did you mean --max-seq-len?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--port"], ["nonsense"], ["--disable-auth"]])
def test_what_cannot_be_read_exits_with_a_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert "main.py: error:" in capsys.readouterr().err


def test_help_lists_every_setting_under_its_section() -> None:
    text = build_parser().format_help()
    assert all(f"  {setting.option} " in text for setting in ALL_SETTINGS)
    assert all(f"\n{section}:\n" in text for section in CATALOG)
    assert "export-config" in text
    assert "export-openapi" in text


def test_download() -> None:
    arguments = parse_arguments(["download", "owner/name"])
    assert (arguments.command, arguments.download) == ("download", DownloadRequest(repo_id="owner/name"))
    arguments = parse_arguments(
        [
            *("--model-dir", "a", "--lora-dir", "b", "download", "owner/name", "--include", "*.json", "b", "--exclude"),
            *("c", "--include", "d", "--revision", "dev", "--folder-name", "mine", "--token", "t", "--type", "lora"),
            *("--lora-dir", "c"),
        ]
    )
    assert arguments.download == DownloadRequest(
        repo_id="owner/name",
        repo_type="lora",
        folder_name="mine",
        revision="dev",
        token="t",
        include=("*.json", "b", "d"),
        exclude=("c",),
    )
    assert arguments.options == {"model": {"model_dir": "a"}, "lora": {"lora_dir": "c"}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["download"], "required: REPO"),
        (["download", "owner/name", "--type", "dataset"], "invalid choice: 'dataset'"),
        (["download", "owner/name", "--includes", "*"], "Unknown option --includes. Did you mean --include?"),
        (["--revision", "dev"], "Unknown option --revision"),
    ],
)
def test_downloads_that_are_none(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert message in capsys.readouterr().err
