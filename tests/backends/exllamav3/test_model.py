"""The container over the real engine: settings in, tokens out."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from loguru import logger

from backends.exllamav3.engine import AsyncGenerator
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from common.generation import Finish, GenerationRequest, Prefill, TextDelta
from common.sampling import SamplingParameters
from tests.scripted import load_settings

GREEDY = SamplingParameters(temperature=0.0)
SMALL = {"cache_size": 8192, "max_seq_len": 8192}


@asynccontextmanager
async def loaded(
    directory: Path, *, draft_model: DraftModelConfig | None = None, **model: object
) -> AsyncIterator[ExllamaV3Container]:
    settings = load_settings(**(SMALL | model))
    if draft_model is not None:
        settings = settings.model_copy(update={"draft_model": draft_model})
    container = ExllamaV3Container.create(directory, settings)
    for _ in container.load():
        pass
    await container.create_generator()
    try:
        yield container
    finally:
        await container.unload()


async def answer(container: ExllamaV3Container, prompt: str | list[int], **fields: Any) -> tuple[str, Finish]:
    request = GenerationRequest(prompt=prompt, sampling=GREEDY, **({"max_tokens": 8} | fields))
    job = container.start(request)
    text, finish = "", None
    async for event in job.events():
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finish):
            finish = event
    await job.cancel()
    assert finish is not None
    return text, finish


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
        await answer(container, list(range(5, 605)))
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
        _, finish = await answer(container, "hello")
        assert finish.usage.completion_tokens == 8


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
        cold, first = await answer(container, prompt)
        warm, second = await answer(container, prompt)
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == 1280  # the last full page of 256
        assert warm == cold


async def test_prefill_progress_and_usage(tiny_llama: Path) -> None:
    async with loaded(tiny_llama, chunk_size=256) as container:
        job = container.start(GenerationRequest(prompt=[7] * 1000, sampling=GREEDY, max_tokens=4))
        events = [event async for event in job.events()]
        progress = [event.done_tokens for event in events if isinstance(event, Prefill)]
        assert progress == sorted(progress)
        assert len(progress) >= 4
        finish = events[-1]
        assert isinstance(finish, Finish)
        assert finish.reason == "length"
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (1000, 4)


async def test_a_prompt_that_cannot_fit_says_how_much_does(tiny_llama: Path) -> None:
    async with loaded(tiny_llama, cache_size=512, max_seq_len=512) as container:
        with pytest.raises(ContextLengthExceeded, match="at most 510"):
            container.start(GenerationRequest(prompt=[7] * 511, sampling=GREEDY))
        _, finish = await answer(container, [7] * 510, max_tokens=100)
        assert finish.usage.completion_tokens == 1


async def test_a_cache_full_of_prompt_is_served_whatever_the_interval(tiny_hybrid: Path) -> None:
    """The engine cuts its reservation at the end of the cache; a stricter check refused what fits."""
    async with loaded(tiny_hybrid, cache_size=4096, max_seq_len=4096, recurrent_checkpoint_interval=6144) as container:
        _, finish = await answer(container, [7] * 4000, max_tokens=1000)
        assert finish.usage.completion_tokens >= 90
        assert finish.reason == "length"


@pytest.mark.parametrize("prompt", ["", [], [10**6], [-1]])
async def test_prompts_that_the_model_cannot_take(tiny_llama: Path, prompt: str | list[int]) -> None:
    async with loaded(tiny_llama) as container:
        with pytest.raises(InvalidRequest) as raised:
            container.start(GenerationRequest(prompt=prompt, sampling=GREEDY, add_bos=False))
        assert raised.value.param == "prompt"


async def test_logprobs_are_finite_and_one_per_token(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        job = container.start(
            GenerationRequest(prompt="hello", sampling=SamplingParameters(top_k=2), max_tokens=6, logprobs=3)
        )
        deltas = [event async for event in job.events() if isinstance(event, TextDelta)]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in entries] == [token for delta in deltas for token in delta.token_ids]
        assert all(-1000.0 <= top.logprob <= 0.0 for entry in entries for top in [entry, *entry.top])
        assert all(len(entry.top) == 3 for entry in entries)


async def test_seeded_requests_repeat_themselves(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        fields: dict[str, Any] = {"max_tokens": 24, "sampling": SamplingParameters(temperature=1.5)}

        async def text(seed: int) -> str:
            job = container.start(GenerationRequest(prompt="once", seed=seed, **fields))
            return "".join([event.text async for event in job.events() if isinstance(event, TextDelta)])

        assert await text(1) == await text(1) != await text(2)


@pytest.mark.parametrize("mode", ["ngram", "model"])
async def test_drafting_changes_no_token(tiny_llama: Path, mode: Literal["ngram", "model"]) -> None:
    """A model that drafts for itself is always right; n-grams of random text seldom are."""
    prompt = [5 + i % 40 for i in range(400)]
    draft = DraftModelConfig(draft_mode=mode, draft_model_dir=str(tiny_llama.parent), draft_model_name=tiny_llama.name)
    async with loaded(tiny_llama) as container:
        plain, _ = await answer(container, prompt, max_tokens=40)
    async with loaded(tiny_llama, draft_model=draft) as container:
        assert container.info().draft_mode == mode
        drafted, finish = await answer(container, prompt, max_tokens=40)
    assert drafted == plain
    usage = finish.usage
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
    "given",
    [
        {"stop_tokens": [1_000_000], "min_tokens": 3},
        {"sampling": SamplingParameters(temperature=0.0, logit_bias={1_000_000: 1.0})},
        {"sampling": SamplingParameters(temperature=0.0, banned_tokens=[1_000_000])},
        {"sampling": SamplingParameters(temperature=0.0, allowed_tokens=[*range(1024), 1_000_000])},
    ],
)
async def test_token_ids_of_another_model_change_nothing(tiny_llama: Path, given: dict[str, Any]) -> None:
    """Clients send fixed lists of them. The engine must not meet them: it would end for every request."""
    async with loaded(tiny_llama) as container:
        plain, _ = await answer(container, "The river")
        request = GenerationRequest(prompt="The river", sampling=GREEDY, max_tokens=8)
        job = container.start(msgspec.structs.replace(request, **given))
        text = "".join([event.text async for event in job.events() if isinstance(event, TextDelta)])
        assert text == plain
        assert not container.broken()


async def test_a_request_that_may_sample_no_token_is_refused(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        sampling = SamplingParameters(allowed_tokens=[5], banned_tokens=[5])
        with pytest.raises(InvalidRequest, match="no token"):
            container.start(GenerationRequest(prompt="x", sampling=sampling))


@pytest.mark.parametrize("window", [1, 2, 3, 10**9])
async def test_any_loop_window_is_taken(tiny_llama: Path, window: int) -> None:
    sampling = SamplingParameters(temperature=0.0, loop_detect_window=window)
    async with loaded(tiny_llama) as container:
        job = container.start(GenerationRequest(prompt="x", sampling=sampling, max_tokens=2))
        assert isinstance([event async for event in job.events()][-1], Finish)


async def test_a_temperature_next_to_nothing_is_greedy(tiny_llama: Path) -> None:
    async with loaded(tiny_llama) as container:
        texts = []
        for temperature in (0.0, 1e-40):
            sampling = SamplingParameters(temperature=temperature)
            job = container.start(GenerationRequest(prompt="a b c", sampling=sampling, max_tokens=8))
            texts.append("".join([event.text async for event in job.events() if isinstance(event, TextDelta)]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_names_its_files(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(tiny_llama, folder)
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"tokenizer of torn .*cannot be read"):
        ExllamaV3Container.create(folder, load_settings(**SMALL))


def test_a_config_with_values_of_the_wrong_type_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}), encoding="utf-8")
    with pytest.raises(InvalidRequest, match="hidden_size"):
        ExllamaV3Container.create(folder, load_settings(**SMALL))
