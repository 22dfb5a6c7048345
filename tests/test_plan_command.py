"""`python main.py plan`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

import main
from backends.manager import ModelManager
from common.args import PlanArguments
from common.caching import PlanBasis
from common.config_models import LoadSettings, Settings
from common.errors import InvalidRequest, ModelNotFound, SettingsError
from common.tabby_config import LoadedSettings
from main import plan_checkpoints

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_plan_of_a_real_model_has_the_settings_of_its_load(tiny_hybrid: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "hybrid"
    shutil.copytree(tiny_hybrid, model)
    (tmp_path / "config.yml").write_text("model:\n  model_dir: models\n  chunk_size: 4096\n", encoding="utf-8")
    (model / "tabby_config.yml").write_text("model:\n  recurrent_checkpoint_interval_pp: 1024\n", encoding="utf-8")
    command = [sys.executable, str(Path(main.__file__)), "--chunk-size", "1024", "plan", "--model", "hybrid"]
    command += ["--prompt-tokens", "5266", "--recurrent-checkpoint-interval", "1024", "--json", "--plot", "p.png"]
    before = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["model"] == "hybrid"
    assert plan["marks"] == [1024, 2048, 3072, 4096, 5120]
    assert plan["budget_bytes"] == 4096 * 1024**2
    assert plan["passes"] == 6
    assert (tmp_path / "p.png").read_bytes().startswith(PNG_SIGNATURE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "p.png"])


class Manager(ModelManager):
    """Starts no process. `dense` has no recurrent layers."""

    async def plan_basis(self, directory: Path, settings: LoadSettings) -> PlanBasis | None:
        if directory.name == "dense":
            return None
        return PlanBasis(
            chunk_size=2048,
            max_seq_len=4096,
            cache_size=4096,
            interval=2048,
            interval_pp=32768,
            checkpoint_bytes=100_000,
            budget_bytes=4 * 1024**2,
        )


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models alpha and dense, over which `main` runs."""
    monkeypatch.setattr(main, "ModelManager", Manager)
    for name in ("alpha", "dense"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path / "models"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


def planned(models: Path, asked: PlanArguments, **model: object) -> str:
    settings = Settings.model_validate({"model": {"model_dir": str(models), **model}})
    return plan_checkpoints(LoadedSettings(settings, {}, [], {}), asked)


def test_text(models: Path) -> None:
    assert planned(models, PlanArguments(4000, model="alpha", boundaries=(1500, 3500))) == (
        """\
alpha, a prompt of 4,000 tokens, chunk_size 2,048, recurrent_checkpoint_interval 2,048, """
        """recurrent_checkpoint_interval_pp 32,768

Checkpoints, at boundaries those with *: 1,280*; 3,328*; 3,840
One takes 97.7 KiB of host RAM, 3 take 293 KiB; memory.sysmem_recurrent_cache (4 MB) holds 41.
Prefill takes 4 passes, 1 of them for the boundaries.
An edit has at most 2,047 unchanged tokens processed again, on top of what follows it.

edit at token  resumed from  tokens processed  the least possible
            0             0             3,999               3,999
          400             0             3,999               3,743
          800             0             3,999               3,231
        1,200             0             3,999               2,975
        1,500         1,280             2,719               2,719
        1,600         1,280             2,719               2,463
        2,000         1,280             2,719               2,207
        2,400         1,280             2,719               1,695
        2,800         1,280             2,719               1,439
        3,200         1,280             2,719                 927
        3,500         3,328               671                 671
        3,600         3,328               671                 415
         none         3,840               159                 159"""
    )


@pytest.mark.parametrize("way", ["name", "path", "default"])
def test_a_model_is_found(models: Path, way: str) -> None:
    name = {"name": "alpha", "path": str(models / "alpha"), "default": None}[way]
    directory = models.parent if way == "path" else models
    text = planned(directory, PlanArguments(1000, model=name), model_name="alpha")
    assert text.startswith("alpha, a prompt of 1,000 tokens")


def test_a_model_that_is_not_there(models: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model 'gamma', neither in .*models nor at that path"):
        planned(models, PlanArguments(1000, model="gamma"))
    with pytest.raises(SettingsError, match="Give one with --model, or set model.model_name"):
        planned(models, PlanArguments(1000))


def test_a_prompt_longer_than_the_context(models: Path) -> None:
    with pytest.raises(InvalidRequest, match="prompt_tokens is 5000; it should be 1 to 4096"):
        planned(models, PlanArguments(5000, model="alpha"))


def test_a_model_without_recurrent_layers_says_what_edits_cost(
    models: Path, tmp_path: Path, warnings: list[str]
) -> None:
    picture = tmp_path / "p.png"
    text = planned(models, PlanArguments(1000, model="dense", plot=str(picture)))
    assert text == "dense has no recurrent layers and needs no checkpoints: an edit costs what follows it."
    assert warnings == [f"{picture} is not written: there are no checkpoints to draw."]
    assert not picture.exists()
    plan = json.loads(planned(models, PlanArguments(1000, model="dense", as_json=True)))
    assert (plan["recurrent"], plan["marks"], plan["prompt_tokens"]) == (False, [], 1000)


def test_a_target_in_seconds_is_said_to_be_left_out(models: Path, warnings: list[str]) -> None:
    planned(models, PlanArguments(1000, model="alpha"), recurrent_checkpoint_target="3s")
    assert warnings == ["recurrent_checkpoint_target is 3s: without the speed of a loaded model it is left out."]


def test_a_picture_that_cannot_be_written(models: Path) -> None:
    with pytest.raises(SettingsError, match="p.png cannot be written.*--plot"):
        planned(models, PlanArguments(1000, model="alpha", plot="no-such-folder/p.png"))
