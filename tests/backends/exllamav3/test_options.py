"""Options that reach the engine's generator, and those that are refused or said to be in vain."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.checkpoints import MIB
from backends.exllamav3.engine import AsyncGenerator, Cache, Generator
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.options import (
    CORPUS_IDENTITY,
    CORPUS_MAGIC,
    CORPUS_PREFIX,
    changed,
    draft_options,
    known_options,
    prefill_options,
)
from common.config_models import DraftModelConfig, MemoryConfig, ModelConfig
from common.errors import InvalidRequest
from tests.containers import SMALL, answered, loaded
from tests.scripted import load_settings

# Settings of the generator that are passed on where they differ from the engine's default; in its own units.
PASSED_ON: dict[str, Any] = {
    **ModelConfig().model_dump(include={"shared_chunk_size", "prefill_cooldown"}),
    **DraftModelConfig().model_dump(
        include={"ngram_corpus", "draft_confidence", "hybrid_draft_tokens", "draft_max_rows", "sparse_draft_head"}
    ),
    **MemoryConfig().model_dump(
        include={
            "disk_cache_dir",
            "disk_cache_flush_on_idle",
            "disk_cache_checkpoint_interval",
            "disk_cache_write_interval",
        }
    ),
    "disk_cache_size": MemoryConfig().disk_cache_size * MIB,
}


def create(directory: Path, *, draft_model: DraftModelConfig | None = None, **model: object) -> ExllamaV3Container:
    settings = load_settings(**(SMALL | model))
    return ExllamaV3Container.create(
        directory, settings.model_copy(update={"draft_model": draft_model or DraftModelConfig()})
    )


class Recorder:
    """Stands in for AsyncGenerator and keeps the arguments of the call."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> Any:
        self.arguments = arguments
        return AsyncGenerator(**arguments)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("backends.exllamav3.model.AsyncGenerator", recorder)
    return recorder


# --- what reaches the generator ---------------------------------------------------------------------------------------


def test_our_defaults_are_those_of_the_engine() -> None:
    parameters = inspect.signature(Generator.__init__).parameters
    assert {name: parameters[name].default for name in PASSED_ON} == PASSED_ON
    assert str(inspect.signature(Cache.__init__).parameters["recurrent_dtype"].default) == "torch.float16"
    assert ModelConfig().recurrent_dtype == "fp16"


async def test_nothing_is_passed_on_that_is_at_its_default(tiny_llama: Path, recorder: Recorder) -> None:
    async with loaded(tiny_llama):
        assert not recorder.arguments.keys() & PASSED_ON.keys()


async def test_everything_else_is(tiny_hybrid: Path, recorder: Recorder) -> None:
    draft = DraftModelConfig(draft_mode="ngram", hybrid_draft_tokens=6, draft_max_rows=9)
    async with loaded(tiny_hybrid, draft_model=draft, shared_chunk_size=256, prefill_cooldown=0) as container:
        assert {name: recorder.arguments[name] for name in recorder.arguments.keys() & PASSED_ON.keys()} == {
            "shared_chunk_size": 256,
            "prefill_cooldown": 0,
            "hybrid_draft_tokens": 6,
            "draft_max_rows": 9,
        }
        # What the cache of a recurrent model can take back; the engine refuses less once the weights are loaded.
        assert container.cache.max_history == 6
        assert container.warnings == []


@pytest.mark.slow
async def test_a_hybrid_draft_needs_no_other_and_changes_no_token(tiny_hybrid: Path) -> None:
    """A prompt that repeats itself is drafted from."""
    prompt = [5 + i % 7 for i in range(60)]
    async with loaded(tiny_hybrid) as container:
        plain = await answered(container, prompt, max_tokens=60)
    async with loaded(tiny_hybrid, draft_model=DraftModelConfig(hybrid_draft_tokens=3)) as container:
        drafted = await answered(container, prompt, max_tokens=60)
        assert container.generator is not None
        assert container.generator.generator.hybrid_rounds > 0
    assert drafted.token_ids == plain.token_ids


def test_an_option_that_this_engine_lacks_is_named() -> None:
    options, advice = known_options({"hybrid_draft_tokens": 4, "no_such_option": 1})
    assert options == {"hybrid_draft_tokens": 4}
    (line,) = advice
    assert "no_such_option has no effect: exllamav3 " in line


def test_changed_compares_with_the_default_of_the_field() -> None:
    assert changed(ModelConfig(chunk_size=512, prefill_cooldown=4), "chunk_size", "prefill_cooldown") == {
        "chunk_size": 512
    }


@pytest.mark.parametrize(("name", "advised"), [("tiny_hybrid", False), ("tiny_sliding", True), ("tiny_llama", True)])
def test_a_precision_of_states_that_there_are_not(name: str, advised: bool, request: pytest.FixtureRequest) -> None:
    warnings = create(request.getfixturevalue(name), recurrent_dtype="fp32").warnings
    assert any("recurrent_dtype has no effect" in line for line in warnings) is advised


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_size", "shared", "fits"), [(1000, 1024, True), (1000, 1280, False)])
def test_a_shared_chunk_is_no_larger_than_a_chunk(tiny_llama: Path, chunk_size: int, shared: int, fits: bool) -> None:
    """Chunks of 1,000 are rounded up to 1,024."""
    if fits:
        create(tiny_llama, chunk_size=chunk_size, shared_chunk_size=shared)
        return
    with pytest.raises(InvalidRequest, match="larger than chunk_size 1024") as raised:
        create(tiny_llama, chunk_size=chunk_size, shared_chunk_size=shared)
    assert raised.value.param == "model.shared_chunk_size"


def test_a_shared_chunk_follows_a_chunk_that_is_lowered_later() -> None:
    assert prefill_options(ModelConfig(shared_chunk_size=1024), 512) == {"shared_chunk_size": 512}


# --- drafting ---------------------------------------------------------------------------------------------------------


class Drafter:
    """A draft model, as far as its options go."""

    def __init__(self, **caps: bool) -> None:
        self.caps = caps


@pytest.mark.parametrize(
    ("settings", "drafter", "passed_on"),
    [
        ({"draft_confidence": 0.6, "dynamic_draft": True}, Drafter(), True),
        ({"draft_confidence": 0.6}, Drafter(), False),
        ({"draft_confidence": 0.6, "dynamic_draft": True, "draft_mode": "ngram"}, None, False),
        ({"draft_max_rows": 8}, Drafter(), True),
        ({"draft_max_rows": 8, "draft_mode": "ngram"}, None, True),
        ({"draft_max_rows": 8, "hybrid_draft_tokens": 8}, None, True),
        ({"draft_max_rows": 8}, None, False),
        ({"sparse_draft_head": 9000}, Drafter(attach_target=True), True),
        ({"sparse_draft_head": 9000}, Drafter(), False),
        ({"sparse_draft_head": 9000}, None, False),
        ({"draft_num_tokens": 3}, None, False),
        ({"dynamic_draft": True}, None, False),
        ({"draft_model_name": "x", "draft_mode": "ngram"}, None, False),
        ({"ngram_match_min": 3}, Drafter(), False),
    ],
)
def test_what_has_no_effect_is_said_so_and_left_out(
    tmp_path: Path, settings: dict[str, Any], drafter: Drafter | None, passed_on: bool
) -> None:
    name = next(iter(settings))
    options, advice = draft_options(DraftModelConfig.model_validate(settings), drafter, tmp_path, tensor_parallel=False)
    assert (name in options) is passed_on
    assert [line.startswith(f"draft_model.{name} has no effect") for line in advice] == ([] if passed_on else [True])


def test_a_sparse_head_is_not_for_tensor_parallel(tmp_path: Path) -> None:
    settings = DraftModelConfig(sparse_draft_head=9000)
    options, advice = draft_options(settings, Drafter(attach_target=True), tmp_path, tensor_parallel=True)
    assert options == {}
    assert len(advice) == 1


# --- the corpus -------------------------------------------------------------------------------------------------------


def write_corpus(path: Path, files: dict[str, str], *, magic: bytes = CORPUS_MAGIC, version: int = 1) -> Path:
    """The beginning of a corpus, with the tokenizer's files that it was made with."""
    header = json.dumps({"tokenizer": {"files": files}}).encode()
    path.write_bytes(CORPUS_PREFIX.pack(magic, version, len(header), 64) + header)
    return path


def identity(directory: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in CORPUS_IDENTITY
        if (directory / name).exists()
    }


def test_a_corpus_needs_what_it_is_unpacked_with(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus", identity(tiny_llama))
    settings = DraftModelConfig(draft_mode="ngram", ngram_corpus=str(corpus))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert draft_options(settings, None, tiny_llama, tensor_parallel=False) == ({"ngram_corpus": str(corpus)}, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="pip install zstandard"):
        draft_options(settings, None, tiny_llama, tensor_parallel=False)


def test_a_corpus_that_cannot_be_used_is_refused_before_loading(tmp_path: Path, tiny_llama: Path) -> None:
    fits = identity(tiny_llama)
    good = write_corpus(tmp_path / "good", fits)
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(good.read_bytes()[:30])
    refused = {
        "cannot be read": tmp_path / "missing",
        "is no index": tmp_path / "empty",
        "is no index .*engine's own tool": tmp_path / "cut",
        "no index that exllamav3 can read": write_corpus(tmp_path / "foreign", fits, magic=b"OTHERSAM"),
        "no index": write_corpus(tmp_path / "newer", fits, version=2),
        "tokenizer.json of .* differs": write_corpus(tmp_path / "other", fits | {"tokenizer.json": "0"}),
        "added_tokens.json of .* differs": write_corpus(tmp_path / "more", fits | {"added_tokens.json": "0"}),
    }
    for message, path in refused.items():
        with pytest.raises(InvalidRequest, match=message) as raised:
            create(tiny_llama, draft_model=DraftModelConfig(draft_mode="ngram", ngram_corpus=str(path)))
        assert raised.value.param == "draft_model.ngram_corpus"
    with pytest.raises(InvalidRequest, match="for draft_mode ngram, not disabled"):
        create(tiny_llama, draft_model=DraftModelConfig(draft_mode="disabled", ngram_corpus=str(good)))
