"""The container over the real engine: settings in, tokens out."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from loguru import logger

from backends.exllamav3.engine import AsyncGenerator
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from common.generation import GenerationRequest
from tests.containers import GREEDY, SMALL, answered, loaded
from tests.models import make_gemma4
from tests.scripted import load_settings


@pytest.fixture
def log() -> Any:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


class RecordedGenerator:
    """Stands in for AsyncGenerator and keeps the arguments of the call."""

    calls: list[dict[str, Any]]

    def __init__(self, original: Callable[..., Any]) -> None:
        self.calls = []
        self._original = original

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        return self._original(**arguments)


@pytest.fixture
def generator_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    recorder = RecordedGenerator(AsyncGenerator)
    monkeypatch.setattr("backends.exllamav3.model.AsyncGenerator", recorder)
    return recorder.calls


# --- the checkpoint intervals -------------------------------------------------------------------------------------

BOTH = {"recurrent_checkpoint_interval", "recurrent_checkpoint_interval_pp"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"recurrent_checkpoint_interval": 1024},
        {"recurrent_checkpoint_interval_pp": 2048},
        {"recurrent_checkpoint_interval": 1024, "recurrent_checkpoint_interval_pp": 2048},
    ],
)
async def test_only_intervals_that_are_set_reach_the_generator(
    tiny_hybrid: Path, generator_calls: list[dict[str, Any]], given: dict[str, Any]
) -> None:
    async with loaded(tiny_hybrid, **given):
        (arguments,) = generator_calls
        assert {name: value for name, value in arguments.items() if name in BOTH} == given


@pytest.mark.parametrize(
    ("given", "in_force"),
    [
        ({}, (2048, 32768)),
        ({"recurrent_checkpoint_interval": 1024}, (1024, 32768)),
        ({"recurrent_checkpoint_interval": 512, "recurrent_checkpoint_interval_pp": 1024}, (512, 1024)),
    ],
)
async def test_the_values_in_force_are_logged_and_on_the_card(
    tiny_hybrid: Path, log: list[str], given: dict[str, Any], in_force: tuple[int, int]
) -> None:
    async with loaded(tiny_hybrid, **given) as container:
        (line,) = [line for line in log if line.startswith("Using recurrent checkpoint intervals")]
        assert all(f"{value:,}" in line or str(value) in line for value in in_force)
        checkpoints = container.info().checkpoints
        assert checkpoints is not None
        assert (checkpoints.interval, checkpoints.interval_pp) == in_force
        await answered(container, list(range(5, 605)))
        engine = container.generator.generator  # type: ignore[union-attr]
        sizes = {entry["checkpoint_size"] for entry in engine.recurrent_cache.values()}
        assert sizes == {checkpoints.bytes}
        assert checkpoints.capacity == 4096 * 1024**2 // checkpoints.bytes


async def test_a_model_without_recurrent_layers_warns_and_loads(tiny_llama: Path, log: list[str]) -> None:
    async with loaded(tiny_llama, recurrent_checkpoint_interval=1024) as container:
        assert any("recurrent_checkpoint_interval" in line and "no recurrent layers" in line for line in log)
        assert not any(line.startswith("Using recurrent checkpoint intervals") for line in log)
        info = container.info()
        assert info.checkpoints is None
        assert info.warnings
        assert (await answered(container, "hello")).finish.usage.completion_tokens == 8


async def test_the_generator_takes_no_argument_it_does_not_know(
    tiny_hybrid: Path, generator_calls: list[dict[str, Any]]
) -> None:
    """The engine swallows a misspelled keyword without a word."""
    async with loaded(
        tiny_hybrid, recurrent_checkpoint_interval=1024, recurrent_checkpoint_interval_pp=1024
    ) as container:
        known = set(inspect.signature(type(container.generator.generator).__init__).parameters)  # type: ignore[union-attr]
        assert set(generator_calls[0]) <= known - {"kwargs"}


# --- generation ---------------------------------------------------------------------------------------------------


async def test_a_second_turn_resumes_from_the_checkpoint(tiny_hybrid: Path) -> None:
    prompt = [5 + i % 900 for i in range(1500)]
    async with loaded(tiny_hybrid) as container:
        cold, warm = await answered(container, prompt), await answered(container, prompt)
        assert cold.finish.usage.cached_tokens == 0
        assert warm.finish.usage.cached_tokens == 1280  # the last full page of 256
        assert warm.text == cold.text


async def test_a_prompt_that_cannot_fit_says_how_much_does(tiny_llama: Path) -> None:
    async with loaded(tiny_llama, cache_size=512, max_seq_len=512) as container:
        with pytest.raises(ContextLengthExceeded, match="at most 510"):
            container.start(GenerationRequest(prompt=[7] * 511, sampling=GREEDY))
        answer = await answered(container, [7] * 510, max_tokens=100)
        assert answer.finish.usage.completion_tokens == 1


async def test_a_cache_full_of_prompt_is_served_whatever_the_interval(tiny_hybrid: Path) -> None:
    """The engine cuts its reservation at the end of the cache; a stricter check refused what fits."""
    async with loaded(tiny_hybrid, cache_size=4096, max_seq_len=4096, recurrent_checkpoint_interval=6144) as container:
        finish = (await answered(container, [7] * 4000, max_tokens=1000)).finish
        assert finish.usage.completion_tokens >= 90
        assert finish.reason == "length"


@pytest.mark.parametrize("prompt", ["", [], [10**6], [-1]])
async def test_prompts_that_the_model_cannot_take(tiny_llama: Path, prompt: str | list[int]) -> None:
    async with loaded(tiny_llama) as container:
        with pytest.raises(InvalidRequest) as raised:
            container.start(GenerationRequest(prompt=prompt, sampling=GREEDY, add_bos=False))
        assert raised.value.param == "prompt"


@pytest.mark.parametrize("mode", ["ngram", "model"])
async def test_drafting_changes_no_token(tiny_llama: Path, mode: Literal["ngram", "model"]) -> None:
    """A model that drafts for itself is always right; n-grams of random text seldom are."""
    prompt = [5 + i % 40 for i in range(400)]
    draft = DraftModelConfig(draft_mode=mode, draft_model_dir=str(tiny_llama.parent), draft_model_name=tiny_llama.name)
    async with loaded(tiny_llama) as container:
        plain = await answered(container, prompt, max_tokens=40)
    async with loaded(tiny_llama, draft_model=draft) as container:
        assert container.info().draft_mode == mode
        drafted = await answered(container, prompt, max_tokens=40)
    assert drafted.text == plain.text
    usage = drafted.finish.usage
    assert usage.accepted_draft_tokens > 0 if mode == "model" else usage.rejected_draft_tokens > 0


async def test_text_round_trips_through_encode_and_decode(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        text = "def f(x):\n    return x  # naïve ☃"
        tokens = container.encode(text, add_bos=False, encode_special_tokens=True)
        assert container.decode(tokens, decode_special_tokens=True) == text
        with pytest.raises(InvalidRequest):
            container.decode([10**7], decode_special_tokens=True)


# --- what cannot be loaded ----------------------------------------------------------------------------------------


def test_a_folder_of_another_engine_is_refused_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="gptq"):
        ExllamaV3Container.create(folder, load_settings())


@pytest.mark.parametrize("shards", [False, True])
def test_missing_weights_are_noticed_before_anything_is_loaded(tmp_path: Path, tiny_llama: Path, shards: bool) -> None:
    folder = tmp_path / "partial"
    shutil.copytree(tiny_llama, folder)
    if shards:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    else:
        (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="partial is incomplete: .*safetensors missing"):
        ExllamaV3Container.create(folder, load_settings())


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(InvalidRequest, match="NoSuchForCausalLM"):
        ExllamaV3Container.create(tmp_path, load_settings())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tokenizer.json", r"The tokenizer of torn \(tokenizer.json, .*cannot be read"),
        ("tokenizer_config.json", "tokenizer_config.json of torn is not JSON"),
    ],
)
def test_a_broken_tokenizer_names_its_files(tmp_path: Path, tiny_llama: Path, name: str, what: str) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(tiny_llama, folder)
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=what):
        ExllamaV3Container.create(folder, load_settings(**SMALL))


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"architectures": []}, "odd is not a model that ExLlamaV3 can load"),
        ({"rope_scaling": 3}, "odd is not a model that ExLlamaV3 can load"),
    ],
)
def test_a_config_that_the_engine_cannot_use_is_refused(
    tmp_path: Path, tiny_llama: Path, values: dict[str, Any], what: str
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=what):
        ExllamaV3Container.create(folder, load_settings(**SMALL))


def test_layers_that_the_engine_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = make_gemma4(tmp_path / "gemma4")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["hidden_size_per_layer_input"] = 32
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidRequest, match="gemma4 is not a model that ExLlamaV3 can load: .*per-layer inputs"):
        ExllamaV3Container.create(folder, load_settings(**SMALL))
