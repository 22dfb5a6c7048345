"""Embedding models as processes: loading, exchanging, failing, coming back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.embeddings.manager import EmbeddingManager
from backends.embeddings.messages import EmbedOptions
from common.config_models import EmbeddingsConfig
from common.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineHangs,
    EngineOutOfMemory,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotLoaded,
    RequestCancelled,
    Unsupported,
)
from tests.scripted_embedder import vector

SCRIPTED = (sys.executable, "-m", "tests.scripted_embedder")
# The real process where the extra is missing.
WITHOUT_EXTRA = (
    sys.executable,
    "-c",
    "import sys; sys.modules['sentence_transformers'] = None\n"
    "from backends.embeddings import worker; worker.run(worker.open_model)",
)
FOLDERS = ("a-reranker", "broken", "foreign", "one", "slow", "two")
RAW = EmbedOptions(normalize=False)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


@asynccontextmanager
async def managing(
    model_dir: Path,
    *,
    command: Sequence[str] = SCRIPTED,
    on_demand: bool = False,
    engine_timeout: float = 0,
    **settings: object,
) -> AsyncIterator[EmbeddingManager]:
    config = EmbeddingsConfig.model_validate({"embedding_model_dir": str(model_dir), **settings})
    manager = EmbeddingManager(config, load_on_demand=on_demand, worker_command=command, engine_timeout=engine_timeout)
    try:
        yield manager
    finally:
        await manager.close()


async def embed(manager: EmbeddingManager, text: str, model: str | None = None) -> list[float]:
    return (await manager.embed(model, [text], RAW)).floats()[0]


async def test_several_models_are_up_and_the_first_that_fits_answers(model_dir: Path) -> None:
    async with managing(model_dir) as manager:
        with pytest.raises(ModelNotLoaded, match="No embedding model is loaded"):
            await embed(manager, "a")
        await manager.load("a-reranker")
        with pytest.raises(ModelNotLoaded, match="Only rerankers are loaded"):
            await embed(manager, "a")
        one = await manager.load("one")
        assert await manager.load("one") is one
        assert list(manager.loaded) == ["a-reranker", "one"]
        answer = await manager.embed(None, ["abc", "d d"], RAW)
        assert (answer.model, answer.floats(), answer.tokens) == ("one", [vector("abc"), vector("d d")], 3)
        assert (await manager.rank(None, "ab", ["ab"])).model == "a-reranker"
        assert (await manager.rank("one", "ab", ["ab"])).model == "one"
        with pytest.raises(InvalidRequest, match="a-reranker is a reranker") as raised:
            await embed(manager, "a", "a-reranker")
        assert raised.value.param == "model"
        with pytest.raises(ModelNotFound, match="no embedding model 'two' loaded; those that are: a-reranker, one"):
            await embed(manager, "a", "two")

        await manager.unload("a-reranker")
        with pytest.raises(ModelNotLoaded, match="'a-reranker' is not loaded"):
            await manager.unload("a-reranker")
        await manager.unload()
        with pytest.raises(ModelNotLoaded):
            await manager.unload()


@pytest.mark.slow
async def test_a_model_is_replaced_once_another_is_ready_in_its_place(model_dir: Path, log_lines: list[str]) -> None:
    async with managing(model_dir) as manager:
        on_cpu = await manager.load("one")
        on_gpu = await manager.load("one", "cuda")
        assert (on_gpu.info.device, on_cpu.state, dict(manager.loaded)) == ("cuda", "closed", {"one": on_gpu})
        with pytest.raises(ModelLoadFailed, match="broken: OSError: cannot read .*Its files may be damaged") as raised:
            await manager.load("broken")
        assert str(model_dir) not in raised.value.message
        with pytest.raises(Unsupported, match="foreign needs code that comes with the model, which is never run"):
            await manager.load("foreign")
        while not any("what a library prints must not reach" in line for line in log_lines):
            await asyncio.sleep(0.01)  # it comes by a pipe of its own
        assert dict(manager.loaded) == {"one": on_gpu}
        assert await embed(manager, "abc") == vector("abc")


async def test_names_lead_to_folders_of_models_only(model_dir: Path) -> None:
    async with managing(model_dir) as manager:
        for name in ("..", "a/../../b", "", str(model_dir / "one")):
            with pytest.raises(InvalidRequest, match="must name a folder inside"):
                await manager.load(name)
        (model_dir / "empty").mkdir()
        for name in ("three", "empty", "a" * 300):
            with pytest.raises(ModelNotFound, match="no embedding model"):
                await manager.load(name)
        assert manager.list_models() == list(FOLDERS)


@pytest.mark.slow
async def test_a_process_that_dies_and_one_whose_gpu_fails_come_back(model_dir: Path) -> None:
    back: list[bool] = []
    async with managing(model_dir) as manager:
        manager.on_restart = back.append
        await manager.load("one")
        with pytest.raises(EngineFailed, match="ended with code 3"):
            await embed(manager, "CRASH")
        assert await embed(manager, "abc") == vector("abc")
        with pytest.raises(EngineFailed, match="device-side assert"):
            await embed(manager, "BREAK")
        while manager.loaded["one"].state == "ready":
            await asyncio.sleep(0.01)
        assert await embed(manager, "abc") == vector("abc")
        asked = asyncio.create_task(embed(manager, "HANG"))
        while not manager.loaded["one"].running:
            await asyncio.sleep(0.01)
        process = manager.loaded["one"]._process
        assert process is not None
        process.kill()
        with pytest.raises(
            EngineFailed, match=r"was killed from outside .*embeddings\.embeddings_batch_tokens"
        ) as caught:
            await asked
        assert "cache" not in caught.value.message  # such models have none
        assert await embed(manager, "abc") == vector("abc")
        assert back == [True, True, True]


@pytest.mark.slow
async def test_a_process_that_hangs_is_ended_and_one_that_gets_on_is_not(model_dir: Path) -> None:
    async with managing(model_dir, engine_timeout=5, embeddings_batch_tokens=1) as manager:
        await manager.load("one")
        assert len((await manager.embed(None, ["SLOW"] * 400)).vectors) == 400
        with pytest.raises(EngineHangs, match="no progress for 5 s"):
            await embed(manager, "HANG")
        assert await embed(manager, "abc") == vector("abc")


async def test_small_requests_do_not_wait_for_large_ones_which_end_when_nobody_waits(model_dir: Path) -> None:
    begun: list[str] = []
    async with managing(model_dir, embeddings_batch_tokens=1) as manager:
        client = await manager.load("one")
        large = asyncio.create_task(manager.embed(None, ["SLOW"] * 2048, begin=lambda: begun.append("large")))
        while not begun:
            await asyncio.sleep(0.01)
        assert await embed(manager, "abc") == vector("abc")
        assert not large.done()
        large.cancel()
        while client._has_work:
            await asyncio.sleep(0.01)
        assert await embed(manager, "abc") == vector("abc")
        assert begun == ["large"]
        with pytest.raises(EngineOutOfMemory, match="embeddings_batch_tokens"):
            await embed(manager, "MEMORY")

        large = asyncio.create_task(manager.embed(None, ["SLOW"] * 2048))
        await asyncio.sleep(0)
        assert client.running == 1
        unload = asyncio.create_task(manager.unload())
        with pytest.raises(RequestCancelled, match="one was unloaded"):
            await large
        await unload
        with pytest.raises(ModelNotLoaded):
            await embed(manager, "abc")


async def test_models_are_loaded_on_demand_and_at_start(model_dir: Path, log_lines: list[str]) -> None:
    async with managing(model_dir, on_demand=True, embedding_model_name="three", embeddings_truncate=True) as manager:
        await manager.load_at_start()
        assert any("The embedding model three was not loaded: There is no" in line for line in log_lines)
        answers = await asyncio.gather(embed(manager, "abc", "one"), embed(manager, "d", "one"))
        assert list(answers) == [vector("abc"), vector("d")]
        assert (await manager.embed("one", ["a " * 50])).tokens == 20
        with pytest.raises(ContextLengthExceeded):
            await manager.embed("one", ["a " * 50], EmbedOptions(truncate=False))
        for name in ("three", "../one"):
            with pytest.raises((ModelNotFound, InvalidRequest)) as raised:
                await embed(manager, "abc", name)
            assert raised.value.param == "model"
        assert list(manager.loaded) == ["one"]
        failed = manager.loaded["one"]
        failed.state = "failed"  # it was given up
        assert await embed(manager, "abc", "one") == vector("abc")
        assert manager.loaded["one"] is not failed


@pytest.mark.slow
async def test_closing_gives_up_loads(model_dir: Path) -> None:
    async with managing(model_dir) as manager:
        load = asyncio.create_task(manager.load("slow"))
        while not manager._clients:
            await asyncio.sleep(0)
        await manager.stop_loading()
        with pytest.raises(RequestCancelled, match="shutting down"):
            await load
        with pytest.raises(RequestCancelled, match="loads no model any more"):
            await manager.load("one")
        assert not manager._clients


async def test_without_the_extra_a_load_says_how_to_get_it(model_dir: Path) -> None:
    async with managing(model_dir, command=WITHOUT_EXTRA) as manager:
        with pytest.raises(Unsupported, match=r"--extra embeddings .*pip install \"sentence-transformers>=6,<7\""):
            await manager.load("one")
        assert not manager.loaded
